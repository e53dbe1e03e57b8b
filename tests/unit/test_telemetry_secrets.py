"""Secrets are shown nowhere: found by name where names are the user's, by form everywhere; all else stays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from pa_npu.config.schema import Config
from pa_npu.coordinator.record import tracked_config
from pa_npu.telemetry.report import read_config
from pa_npu.telemetry.secrets import HIDDEN, Secrets, hide, is_secret
from pa_npu.viewer.export import export
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import answer
from tests.helpers.finished_run import make_run

SECRET_NAMES = (
    "DB_AUTH PGPASS PGPASSWORD MYSQL_PWD HF_TOKEN HFTOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY OPENAI_KEY api_key apiKey APIKEY "
    "api-key api_keys auth bearer Authorization X-Auth-Token Cookie password db.passphrase credentials client_secret secrets jwt "
    "SENTRY_DSN access_token MY_TOKEN key --api-key"
)
PLAIN_NAMES = (
    "max_tokens max_token tokenizer TOKENIZERS_PARALLELISM tokens_per_update key_width num_keys keyboard monkey turkey "
    "author authors pad_token eos_token bypass compass passes pass_rate score_key sort_key keyframes OMP_NUM_THREADS PWD PATH "
    "secretary key_value_heads token_budget stop_tokens authentic"
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
    "args: {'api_key': ['S3CRET'], 'port': 8000}": f"args: {{'api_key': ['{HIDDEN}'], 'port': 8000}}",
    '{"auth": "S3CRET", "max_tokens": 5}': f'{{"auth": "{HIDDEN}", "max_tokens": 5}}',
    "DB_AUTH=S3CRET run": f"DB_AUTH={HIDDEN} run",
    "GET /v1?token=S3CRET&n=2": f"GET /v1?token={HIDDEN}&n=2",
    "password: S3CRET": f"password: {HIDDEN}",
    "uses hf_S3CRETS3CRETS3CRET now": f"uses {HIDDEN} now",
}
PLAIN_TEXTS = (
    "http://127.0.0.1:8000/v1/chat",
    "first pass: 0.4 s, second pass: 0.5 s",
    "next token: 5; max_tokens=512, tokenizer=Qwen2, key_width=8",
    "--max-tokens 512 --tokenizer Qwen --key-width 8",
    "2026-01-01 12:00:00 I step 3: loss 0.2, tokens: 512, keys: 4",
    "mail me@example.org at 10:30",
    "{'tokenizer': 'Qwen2', 'max_tokens': 5}",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_in_a_text_is_hidden_and_only_it(text: str) -> None:
    assert hide(text) == TEXTS[text]
    assert hide(TEXTS[text]) == TEXTS[text]


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_a_text_without_secrets_is_as_it_was(text: str) -> None:
    assert hide(text) == text


def tree() -> dict[str, Any]:
    """S3CRET-N are secret; everything else is to be seen."""
    return {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {
            "env": {"DB_AUTH": "S3CRET-0", "PGPASS": "S3CRET-1", "OMP_NUM_THREADS": "1"},
            "extra_args": ["--api-key", "S3CRET-2", "--token=S3CRET-3", "--max-num-seqs", "8"],
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
        "reward": {"functions": [{"name": "judge"}], "judge": {"url": "http://me:S3CRET-8@judge/v1", "model": "j"}},
    }


def test_a_configuration_is_shown_without_its_secrets_and_with_all_else() -> None:
    config = Secrets(tree()).config
    assert "S3CRET" not in json.dumps(config)
    assert config["environment.options.max_tokens"] == 5 and config["environment.options.key_width"] == 8
    assert config["environment.options.tokenizer"] == "Qwen2" and config["rollout.env.OMP_NUM_THREADS"] == "1"
    assert config["rollout.extra_args"] == ["--api-key", HIDDEN, f"--token={HIDDEN}", "--max-num-seqs", "8"]
    assert config["environment.options.headers.Accept"] == "text/plain"
    assert config["reward.judge.url"] == f"http://me:{HIDDEN}@judge/v1"


def test_no_secret_of_a_run_leaves_it_by_page_export_report_or_tracker_and_no_link_is_followed(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tree()))
    said = "".join(f"connected with S3CRET-{number}\n" for number in range(9))
    (run_dir / "logs" / "coordinator.log").write_text(f"{said}DB_AUTH=S3CRET-9\n")
    outside = tmp_path / "outside.log"
    outside.write_text("S3CRET of the machine\n")
    (run_dir / "logs" / "link.log").symlink_to(outside)
    os.mkfifo(run_dir / "logs" / "pipe.log")
    run = RunDirectory(run_dir)
    seen = json.dumps([answer([run], "run"), answer([run, run], "compare"), answer([run], "log/coordinator.log")])
    assert "S3CRET" not in seen and "connected with" in seen
    assert answer([run], "log/link.log") is None and answer([run], "log/pipe.log")["text"] == ""
    export([run], tmp_path / "page.html")
    assert "S3CRET" not in (tmp_path / "page.html").read_text()
    assert "S3CRET" not in json.dumps(Secrets(read_config(run_dir)).config)
    config = Config.model_validate({key: value for key, value in tree().items() if key != "reward"})
    assert "S3CRET" not in json.dumps(tracked_config(config))
