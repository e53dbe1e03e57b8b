"""Secrets are shown nowhere: found by name where names are the user's, by form everywhere; all else stays."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from pa_npu.config.schema import Config
from pa_npu.coordinator.record import tracked_config
from pa_npu.errors import UserError
from pa_npu.telemetry.report import read_config
from pa_npu.telemetry.secrets import HIDDEN, Secrets, hide, is_secret, without_secrets
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import answer, export
from tests.helpers.finished_run import make_run

SECRET_NAMES = (
    "DB_AUTH PGPASS PGPASSWORD MYSQL_PWD HF_TOKEN HFTOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY "
    "OPENAI_KEY api_key apiKey APIKEY api-key api_keys auth bearer Authorization X-Auth-Token "
    "Cookie password db.passphrase credentials client_secret secrets jwt SENTRY_DSN access_token "
    "MY_TOKEN key --api-key CREDS db_cred SLACK_WEBHOOK WEBHOOK_URL AWS_ACCESS_KEY_ID user_pw DBPW "
    "hf_tok GITHUB_PAT X-Amz-Signature X-Api-Key access_tokens user_passcode OTP Pwd pwd db.pwd "
    "OLD_pwd"
)
PLAIN_NAMES = (
    "max_tokens max_token tokenizer TOKENIZERS_PARALLELISM tokens_per_update key_width num_keys "
    "keyboard monkey turkey author authors pad_token eos_token bypass compass passes pass_rate "
    "score_key sort_key keyframes OMP_NUM_THREADS PWD PATH secretary key_value_heads token_budget "
    "stop_tokens authentic token_mean rollout.max_response_tokens max_tok tok tok_s pad_token_id "
    "token_id sig signature fn_signature sacred credit pattern path prompt_key answer_column "
    "input_token forward_pass public_key webhooked incredible num_pat file_pat"
)


def test_names_that_are_secret_and_names_that_only_look_so() -> None:
    assert [name for name in SECRET_NAMES.split() if not any(map(is_secret, name.split(".")))] == []
    assert [name for name in PLAIN_NAMES.split() if is_secret(name)] == []


TEXTS = {
    "postgres://me:S3CRET@db:5432/x": f"postgres://me:{HIDDEN}@db:5432/x",
    "redis://:S3CRET@cache": f"redis://:{HIDDEN}@cache",
    "serve --api-key S3CRET --port 8000": f"serve --api-key {HIDDEN} --port 8000",
    "serve --api-key=S3CRET -tp 2": f"serve --api-key={HIDDEN} -tp 2",
    "Authorization: Bearer S3CRET": f"Authorization: Bearer {HIDDEN}",
    "args: {'api_key': ['S3CRET'], 'port': 8000}": f"args: {{'api_key': ['{HIDDEN}'], 'port': "
    f"8000}}",
    '{"auth": "S3CRET", "max_tokens": 5}': f'{{"auth": "{HIDDEN}", "max_tokens": 5}}',
    "DB_AUTH=S3CRET run": f"DB_AUTH={HIDDEN} run",
    "GET /v1?token=S3CRET&n=2": f"GET /v1?token={HIDDEN}&n=2",
    "password: S3CRET": f"password: {HIDDEN}",
    "uses hf_S3CRETS3CRETS3CRET now": f"uses {HIDDEN} now",
    "X-Api-Key: S3CRET": f"X-Api-Key: {HIDDEN}",
    "api_key: 'S3CRET', port: 3": f"api_key: '{HIDDEN}', port: 3",
    "PGPASS: S3CRET": f"PGPASS: {HIDDEN}",
    "api_key = S3CRET": f"api_key = {HIDDEN}",
    "rollout.env.HF_TOK=S3CRET": f"rollout.env.HF_TOK={HIDDEN}",
    "Authorization: Token S3CRET": f"Authorization: Token {HIDDEN}",
    "Authorization: S3CRET Accept: text/plain": f"Authorization: {HIDDEN} Accept: text/plain",
    "Authorization=Token S3CRET": f"Authorization=Token {HIDDEN}",
    "Proxy-Authorization: Mine S3CRET, S3CRET": f"Proxy-Authorization: {HIDDEN}",
    'Authorization: Digest username="S3CRET", response="S3CRET"': f"Authorization: Digest {HIDDEN}",
    "curl -H 'Authorization: Token S3CRET' http://h/": f"curl -H 'Authorization: Token {HIDDEN}' "
    "http://h/",
    "{'Authorization': 'Token S3CRET', 'Accept': 'a'}": f"{{'Authorization': '{HIDDEN}', 'Accept': "
    f"'a'}}",
    "Cookie: sid=S3CRET; theme=S3CRET": f"Cookie: {HIDDEN}",
    "Basic S3CRETdXNlcjpw": f"Basic {HIDDEN}",
    "http://me:S3CRET@S3CRET@host/x": f"http://me:{HIDDEN}@host/x",
    "http://me:S3C/RET@host/x": f"http://me:{HIDDEN}@host/x",
    "http://me:S3C@RET@h1:80,http://me:S3CRET@h2": f"http://me:{HIDDEN}@h1:80,http://me:{HIDDEN}@h2",
    "pip install git+https://me:S3CRET@host/a@v1": f"pip install git+https://me:{HIDDEN}@host/a@v1",
    "https://S3CRETS3CRETS3CRET@o1.sentry.io/2": f"https://{HIDDEN}@o1.sentry.io/2",
    "https://hooks.slack.com/services/T0/B0/S3CRET": f"https://hooks.slack.com/services/{HIDDEN}",
    "https://discord.com/api/webhooks/1/S3CRET": f"https://discord.com/api/webhooks/{HIDDEN}",
    "https://a.net/c?sv=1&sig=S3CRET%3D&se=2": f"https://a.net/c?sv=1&sig={HIDDEN}&se=2",
    "s3://b/o?X-Amz-Signature=S3CRET": f"s3://b/o?X-Amz-Signature={HIDDEN}",
    "curl -s -u me:S3CRET http://h": f"curl -s -u me:{HIDDEN} http://h",
    "curl -ume:S3CRET http://h": f"curl -ume:{HIDDEN} http://h",
    "curl --user 'me:S3C RET' http://h": f"curl --user 'me:{HIDDEN}' http://h",
    "['curl', '-u', 'me:S3CRET']": f"['curl', '-u', 'me:{HIDDEN}']",
    "sshpass -p S3CRET ssh host": f"sshpass -p {HIDDEN} ssh host",
    'password="S3C RET" x=1': f'password="{HIDDEN}" x=1',
    "--api-key 'S3C RET' --port 8": f"--api-key '{HIDDEN}' --port 8",
    '{"password": "S3C\\" RET", "n": 2}': f'{{"password": "{HIDDEN}", "n": 2}}',
    '"{\\"password\\": \\"S3C RET\\", \\"n\\": 2}"': f'"{{\\"password\\": \\"{HIDDEN}\\", \\"n\\": '
    f'2}}"',
    "DB_PASSWORD=S3C,RE&T;S3C x": f"DB_PASSWORD={HIDDEN} x",
    "f(token=S3CRET,n=2)": f"f(token={HIDDEN},n=2)",
    "['--api-key', 'S3CRET', '--port', '8']": f"['--api-key', '{HIDDEN}', '--port', '8']",
    "'api_key': ['S3CRET', 'S3CRET'], 'n': [1]": f"'api_key': ['{HIDDEN}', '{HIDDEN}'], 'n': [1]",
    "'auth': {'user': 'S3CRET', 'b': {'c': 'S3CRET'}}, 'n': 1": f"'auth': {{'user': '{HIDDEN}', "
    f"'b': {{'c': '{HIDDEN}'}}}}, 'n': "
    "1",
    "-----BEGIN RSA PRIVATE KEY-----\nS3CRET\nS3CRET\n-----END": "-----BEGIN RSA PRIVATE "
    f"KEY-----{HIDDEN}-----END",
}
PLAIN_TEXTS = (
    "http://127.0.0.1:8000/v1/chat",
    "first pass: 0.4 s, second pass: 0.5 s",
    "next token: 5; max_tokens=512, tokenizer=Qwen2, key_width=8",
    "--max-tokens 512 --tokenizer Qwen --key-width 8",
    "2026-01-01 12:00:00 I step 3: loss 0.2, tokens: 512, keys: 4",
    "mail me@example.org at 10:30",
    "{'tokenizer': 'Qwen2', 'max_tokens': 5}",
    "rollout.max_response_tokens=64 algorithm.aggregation=token_mean token: 5, key: x, tok/s: 3, "
    "n_tok=4",
    "http://host:8000, mail me@example.org; http://host:8000/path?mail=me@example.org; "
    "ssh://git@github.com/a",
    "Basic functionality; no bearer token was given; a cookie; the signature: (x) -> y; killed by "
    "sig=9",
    "api_key=None password='' auth: true token = tokens[0]",
    "docker run -u 1000:1000 image; python -u train.py module:function; curl http://host:8000/a",
    "families/hf_checkpoint_reader.py reads sk-learn; forward_pass=0.3 prompt_key=question "
    "pad_token_id=0",
    "/api/webhooks/ in docs; https://host/a?size=3&code_of=x; first-pass 3 s",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_in_a_text_is_hidden_and_only_it(text: str) -> None:
    assert hide(text) == TEXTS[text]
    assert hide(TEXTS[text]) == TEXTS[text]


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_a_text_without_secrets_is_as_it_was(text: str) -> None:
    assert hide(text) == text


@pytest.mark.parametrize(
    "part",
    [
        "a",
        "a-",
        "a=",
        "key=",
        "key=a,",
        "token=[",
        '{"key": {',
        "http://a:",
        "http://a:b@",
        "curl ",
        "://a/webhooks/",
    ],
)
def test_long_texts_are_read_in_time_that_grows_with_them(part: str) -> None:
    start_s = time.thread_time()
    hide(part * (400_000 // len(part)))
    assert time.thread_time() - start_s < 10


def tree() -> dict[str, Any]:
    """S3CRET-N are secret; everything else is to be seen."""
    return {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {
            "env": {"DB_AUTH": "S3CRET-0", "PGPASS": "S3CRET-1", "OMP_NUM_THREADS": "1"},
            "extra_args": [
                "--api-key",
                "S3CRET-2",
                "S3CRET-10",
                "--token=S3CRET-3",
                "--max-num-seqs",
                "8",
            ],
        },
        "environment": {
            "name": "my_module:Mine",
            "options": {
                "auth": {"bearer": "S3CRET-4"},
                "headers": {"Authorization": "S3CRET-5", "Accept": "text/plain"},
                "servers": [{"url": "https://me:S3CRET-6@host/x", "password": "S3CRET-7"}],
                **{"max_tokens": 5, "tokenizer": "Qwen2", "key_width": 8},
            },
        },
        "reward": {
            "functions": [{"name": "judge"}],
            "judge": {"url": "http://me:S3CRET-8@judge/v1", "model": "j"},
        },
    }


def test_a_configuration_is_shown_without_its_secrets_and_with_all_else() -> None:
    config = Secrets(tree()).config
    assert "S3CRET" not in json.dumps(config)
    assert (
        config["environment.options.max_tokens"] == 5
        and config["environment.options.key_width"] == 8
    )
    assert (
        config["environment.options.tokenizer"] == "Qwen2"
        and config["rollout.env.OMP_NUM_THREADS"] == "1"
    )
    assert config["rollout.extra_args"] == [
        "--api-key",
        HIDDEN,
        HIDDEN,
        f"--token={HIDDEN}",
        "--max-num-seqs",
        "8",
    ]
    assert config["environment.options.headers.Accept"] == "text/plain"
    assert config["reward.judge.url"] == f"http://me:{HIDDEN}@judge/v1"


def test_no_secret_of_a_run_leaves_it_by_page_export_report_or_tracker_and_no_link_is_followed(
    tmp_path: Path,
) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tree()))
    output = "".join(f"connected with S3CRET-{number}\n" for number in range(9))
    (run_dir / "logs" / "coordinator.log").write_text(f"{output}DB_AUTH=S3CRET-9\n")
    outside = tmp_path / "outside.log"
    outside.write_text("S3CRET of the machine\n")
    (run_dir / "logs" / "link.log").symlink_to(outside)
    os.mkfifo(run_dir / "logs" / "pipe.log")
    run = RunDirectory(run_dir)
    seen = json.dumps(
        [answer([run], "run"), answer([run, run], "compare"), answer([run], "log/coordinator.log")]
    )
    assert "S3CRET" not in seen and "connected with" in seen
    assert answer([run], "log/link.log") is None and answer([run], "log/pipe.log") is None
    export([run], tmp_path / "page.html")
    assert "S3CRET" not in (tmp_path / "page.html").read_text()
    assert "S3CRET" not in json.dumps(Secrets(read_config(run_dir)).config)
    config = Config.model_validate({key: value for key, value in tree().items() if key != "reward"})
    assert "S3CRET" not in json.dumps(tracked_config(config))


def test_an_environment_that_is_handed_on_has_no_variable_with_a_password_in_its_value() -> None:
    handed_on = {
        "PATH": "/usr/bin:/bin",
        "LS_COLORS": "rs=0:di=01;34",
        "PWD": "/home",
        "ENDPOINT": "http://host:80/a@b",
    }
    secret = {
        "DATABASE_URL": "postgres://user:hunter22@host/db",
        "MONGO_URI": "mongodb://user:hunter22@host",
        "DB_URL": "mysql://user:hunter22@host",
        "CONNECTION_STRING": "Server=host;Password=hunter22;",
        "WANDB_API_KEY": "x",
    }
    assert without_secrets({**handed_on, **secret}) == handed_on


def test_pwd_is_a_password_among_options_and_a_directory_among_variables() -> None:
    tree = {
        "environment": {"options": {"pwd": "hunter22", "db": {"PWD": "other22"}}},
        "rollout": {"env": {"PWD": "/x"}},
    }
    shown = Secrets(tree)
    assert shown.tree["environment"]["options"] == {"pwd": HIDDEN, "db": {"PWD": HIDDEN}}
    assert shown.tree["rollout"]["env"] == {"PWD": "/x"} and "hunter22" not in shown.hide(
        "login hunter22"
    )


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "http://user:hunter22@host:80/reset does not answer",
            "http://user:(not shown)@host:80/reset does not answer",
        ),
        ("'postgres://u:p/w@host'", "'postgres://u:(not shown)@host'"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        ("http://a:1,http://b@c", "http://a:1,http://b@c"),
    ],
)
def test_an_error_message_has_no_password_of_a_url(message: str, shown: str) -> None:
    assert str(UserError(message)) == shown
