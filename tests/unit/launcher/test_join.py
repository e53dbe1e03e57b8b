"""Joining a run: what cannot work is one line before anything starts, and each end of an engine's life has its exit code."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pa_npu.config.schema import Config
from pa_npu.control import roster as roster_module
from pa_npu.control.channel import BoundedCalls, StoreChannel, StoreError, connect
from pa_npu.control.roster import PREFIX, Roster
from pa_npu.errors import UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher import join, join_command
from pa_npu.launcher.cli import main as launcher
from pa_npu.launcher.join import JoinedEngine, check_site, with_environment
from pa_npu.launcher.process.supervisor import StopSignals
from pa_npu.launcher.run import _for_joining
from pa_npu.launcher.run_directory import begin_attempt
from tools.stand_in import write_interpreter

KEY = "key-of-the-run"
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    shapes = ModelSpec.read(str(model)).hf_tensors()
    save_file(
        {name: np.ones(shape, np.float32) for name, shape in shapes.items()},
        model / "model.safetensors",
    )
    (tmp_path / "run").mkdir()
    return Config.model_validate(
        {
            "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
            "model": {"path": str(model)},
            "data": {"train": "t", "max_prompt_tokens": 16},
            "rollout": {
                "python": str(write_interpreter(tmp_path / "python")),
                "max_response_tokens": 16,
            },
        }
    )


@dataclass
class Store:
    server: dist.TCPStore
    roster: Roster

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return Store(server, Roster(StoreChannel(connect("127.0.0.1", server.port, 10.0), PREFIX), KEY))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which joining is refused."""
    assert launcher(["join", *arguments]) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    ), captured
    return captured.err


def test_where_no_run_is_one_line_says_so(store, capsys, monkeypatch):
    monkeypatch.setattr(join, "_CONNECT_TIMEOUT_S", 1.0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        line = refusal(capsys, f"127.0.0.1:{unused.getsockname()[1]}")
    assert "no run of pa_npu answers there" in line and "launcher prints" in line
    line = refusal(capsys, store.address)
    assert "no run of pa_npu answers there" in line, "a store of something else"


LONG = "a" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        (f"{LONG}:29500",),
        (f"{'a' * 64}.example:29500",),
        ("a..b:29500",),
        ("a\x00b:29500",),
        ("half\ud800:29500",),
        ("[]:29500",),
        (f"localhost:{'9' * 5000}",),
        ("localhost:0",),
        ("localhost:29500", "--host", LONG),
        ("localhost:29500", "--host", ""),
        ("localhost:29500", "--devices", "9" * 5000),
        ("localhost:29500", "--python", "/" + "a/" * 3000),
        ("localhost:29500", "--python", "a\x00b"),
    ],
    ids=lambda arguments: (
        " ".join(part[:24] for part in arguments).encode("unicode_escape").decode()
    ),
)
def test_an_argument_that_cannot_be_right_is_one_line_before_anything_is_asked(
    arguments, capsys, monkeypatch
):
    monkeypatch.setattr(join, "find_run", lambda *_: pytest.fail("asked a store"))
    code = launcher(["join", *arguments])
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert code == 2 and printed.out == "" and line.startswith("error: command line: ")
    assert len(line) < 300 and line.isprintable(), line


_TEXTS = st.one_of(
    st.text(max_size=400),
    st.text("ab.:[]-%0159\0", max_size=80),
    st.sampled_from(["::1", "::", "a.b", "0", "4,5", ","]),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(st.sampled_from(["--host", "--devices", "--python"]), _TEXTS),
    _TEXTS,
)
def test_any_arguments_are_refused_or_passed_on_as_what_the_system_takes(
    others: dict[str, str], address: str
) -> None:
    """Whatever passes can be given to the resolver and the file system: they answer, or raise
    OSError.
    """
    arguments = [f"{key}={value}" for key, value in others.items()]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as output:
            parser = argparse.ArgumentParser()
            join_command.join_options(parser)
            options = parser.parse_args([*arguments, "--", address])
    except SystemExit as ended:
        assert (
            ended.code == 2
            and ": error: " in output.getvalue()
            and "Traceback" not in output.getvalue()
        )
        return
    for host, port in (options.join, (options.host or "a", 1)):
        assert 0 <= port <= 65535 and "\0" not in host and len(host.encode("idna")) < 256
    if options.python is not None:
        with contextlib.suppress(OSError):
            os.stat(options.python)


def test_a_key_file_that_is_not_one_is_one_line(store, capsys, config, tmp_path):
    store.roster.publish_config(config.model_dump(mode="json"))
    os.mkfifo(tmp_path / "pipe")
    rollout = config.rollout.model_copy(update={"key_file": str(tmp_path / "pipe")})
    store.roster.publish_config(
        config.model_copy(update={"rollout": rollout}).model_dump(mode="json")
    )
    assert "API key: it is neither in VLLM_API_KEY nor in " in refusal(capsys, store.address)
    (tmp_path / "run" / "api_key").write_bytes(b"\xff" * 5000)
    assert "api_key cannot be read (" in refusal(capsys, store.address)


def test_what_is_not_on_this_machine_is_named(store, capsys, config, tmp_path):
    tree = config.model_dump(mode="json")
    (key := tmp_path / "run" / "api_key").write_text(KEY)
    store.roster.publish_config(tree | {"model": tree["model"] | {"path": "/nowhere/Qwen"}})
    line = refusal(capsys, store.address)
    assert "model.path: /nowhere/Qwen" in line and "not a directory on this machine" in line
    store.roster.publish_config(tree)
    for options, wanted in (
        (["--python", "/nowhere/python"], "rollout.python: /nowhere/python is not an executable"),
        (["--host", "192.0.2.1"], "--host: cannot listen on 192.0.2.1"),
        (["--host", "0.0.0.0"], "--host: 0.0.0.0 is no address that the coordinator can reach"),
        (["--devices", "0,1"], "--devices: 0,1 are not 1 different ones"),
        (["--devices", "100000"], "--devices: 100000 is not here"),
    ):
        assert wanted in refusal(capsys, store.address, *options), options
    key.unlink()
    assert "API key: it is neither in VLLM_API_KEY nor in " in refusal(capsys, store.address)


def test_a_configuration_of_another_version_is_named_as_that(store, capsys, config, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    store.roster.publish_config(config.model_dump(mode="json") | {"fusion": {"power": 3}})
    line = refusal(capsys, store.address)
    assert "fusion" in line and "its version of pa_npu another" in line


def test_a_configuration_or_an_engine_that_was_not_signed_with_the_runs_key_is_not_taken(
    store, capsys, config, tmp_path, monkeypatch, caplog
):
    """A stranger can reach the store, and has read everything in it."""
    store.roster.publish_config(config.model_dump(mode="json"))
    mine = store.roster.announce("http://127.0.0.1:1")
    channel = StoreChannel(connect("127.0.0.1", store.server.port, 10.0), PREFIX)
    assert KEY.encode() not in channel.get_bytes("0") + channel.get_bytes("config")
    stranger = Roster(channel, "another key")
    stranger.announce("http://127.0.0.1:6666")
    channel.put_bytes("2", channel.get_bytes("0"))  # a signed entry holds in its place alone
    roster_module.COUNT.add(channel)
    for index in (mine, 2):
        stranger.ask_leave(index)
    assert [(entry.url, entry.leaving) for entry in store.roster.entries()] == [
        ("http://127.0.0.1:1", False)
    ]
    assert caplog.text.count("is not signed with the run's API key") == 1

    (tmp_path / "run" / "api_key").write_text("a-strangers-key")
    line = refusal(capsys, store.address)
    assert "api_key: is not the API key of the run at" in line and "a-strangers-key" not in line
    stranger.publish_config(config.model_dump(mode="json"))
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    line = refusal(capsys, store.address)
    assert "VLLM_API_KEY: is not the API key of" in line and KEY not in line
    if os.geteuid() == 0:
        monkeypatch.delenv("VLLM_API_KEY")
        (file := tmp_path / "run" / "api_key").write_text("another key")
        os.chown(file, 4321, 4321)
        assert "is another user's" in refusal(capsys, store.address), (
            "the stranger's key in the stranger's directory"
        )


def test_the_store_holds_no_value_of_the_engines_environment_and_an_engine_that_joins_has_them_all_the_same(
    config, monkeypatch
):
    secret: dict[str, Any] = {
        "env": {"PGPASS": "S3CRET-1", "PLAIN": "S3CRET-2"},
        "extra_args": ("--token", "S3CRET-3", "--seed", "1"),
    }
    rollout = config.rollout.model_copy(update=secret)
    environment = config.environment.model_copy(update={"options": {"anything": "S3CRET-4"}})
    config = config.model_copy(update={"rollout": rollout, "environment": environment})
    tree = _for_joining(config)
    assert "S3CRET" not in json.dumps(tree) and tree["rollout"]["extra_args"][2:] == ["--seed", "1"]
    with pytest.raises(
        UserError,
        match=r"does not hold PGPASS, PLAIN of rollout\.env, and .*config\.yaml cannot be read "
        r"here",
    ):
        with_environment(tree, "the run")
    for name, value in secret["env"].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"does not hold what is secret in rollout\.extra_args"):
        with_environment(tree, "the run")
    glued = {
        **tree,
        "rollout": {**tree["rollout"], "env": {}, "extra_args": ["--token=(not shown)"]},
    }
    with pytest.raises(UserError, match=r"does not hold what is secret in rollout\.extra_args"):
        with_environment(glued, "the run")
    only_env = {**tree, "rollout": {**tree["rollout"], "extra_args": []}}
    assert with_environment(only_env, "the run")["rollout"]["env"] == secret["env"]
    begin_attempt(config, print)
    file = Path(config.run.dir) / "config.yaml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    actual = with_environment(tree, "the run")["rollout"]
    assert actual["env"] == secret["env"] and tuple(actual["extra_args"]) == secret["extra_args"]


def test_the_published_paths_hold_from_any_directory(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "python").touch()
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate(
        {
            "run": {"dir": "runs/a"},
            "model": {"path": "model"},
            "data": {"train": "t"},
            "rollout": {"python": "python"},
        }
    )
    tree = _for_joining(config)
    assert (tree["run"]["dir"], tree["model"]["path"]) == (
        str(tmp_path / "runs/a"),
        str(tmp_path / "model"),
    )
    assert tree["rollout"]["python"] == str(tmp_path / "python")
    named = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"python": "python3.11"})}
    )
    assert _for_joining(named)["rollout"]["python"] == "python3.11", "a name on PATH stays one"


def test_an_accelerators_devices_must_be_named_and_are_then_the_engines_own(config, monkeypatch):
    class Accelerator:
        name = "npu"
        visible_devices_env = "ASCEND_RT_VISIBLE_DEVICES"

        def device_count(self) -> int:
            return 8

    monkeypatch.setattr(join.platforms, "get", lambda name: Accelerator())
    monkeypatch.setattr(
        join, "engine_kind", lambda name: SimpleNamespace(check=lambda config: None)
    )
    rollout = config.rollout.model_copy(update={"tensor_parallel": 2})
    wide = config.model_copy(update={"rollout": rollout})
    with pytest.raises(UserError, match=r"--devices: an engine on npu needs 2 .*--devices 0,1"):
        check_site(wide, "127.0.0.1", None, None, "the run")
    with pytest.raises(UserError, match="8 is not here; there are 8"):
        check_site(wide, "127.0.0.1", (7, 8), None, "the run")
    site = check_site(wide, "127.0.0.1", (6, 7), None, "the run")
    assert site.placement.engine_devices == ((6, 7),) and site.placement.engine_cores == ((),)


def test_a_store_that_falls_silent_ends_the_engine(config, monkeypatch):
    release = threading.Event()
    life = Life(config, monkeypatch)
    life.engine.asked = BoundedCalls("store calls", 0.05)
    monkeypatch.setattr(life.roster, "has_left", lambda index: release.wait())
    try:
        assert life.run(nothing) == 1
    finally:
        release.set()
    assert life.said("failed: the store of the run: it does not answer")


@dataclass
class Server:
    """A server process of which the test decides when it ends."""

    exit_code: int | None = None
    log: Path = Path("engine.log")

    def describe_end(self) -> str:
        return f"exit code {self.exit_code}"

    def last_lines(self, count: int) -> list[str]:
        return ["CUDA out of memory"]


@dataclass
class Lines:
    lines: list[str] = field(default_factory=list)

    def print_line(self, line: str) -> None:
        self.lines.append(line)

    print_error = print_line


class Life:
    """One engine over a roster in memory, whose events happen at the joiner's own ticks: `script`
    yields after each of them.
    """

    def __init__(
        self, config: Config, monkeypatch: pytest.MonkeyPatch, answers: bool = True
    ) -> None:
        self.roster = Roster(StoreChannel(dist.HashStore()), "")
        self.roster.publish_config({})
        self.server = Server()
        self.console = Lines()
        self.signals = StopSignals()
        self.engine = JoinedEngine(
            config,
            self.roster,
            self.server,
            "http://here:1",
            "the run",
            self.console,
            self.signals,
            BoundedCalls("store calls", 30.0),  # type: ignore[arg-type]
        )
        monkeypatch.setattr(join, "engine_answers", lambda url: answers)
        self._monkeypatch = monkeypatch

    def run(self, *events: Callable[[], object]) -> int:
        """The exit code; before the joiner's n-th pause ends, event n happens."""
        left = list(events)

        def pause(seconds: float) -> None:
            assert left, f"nothing more happens, and the joiner waits: {self.console.lines}"
            left.pop(0)()

        self._monkeypatch.setattr(join.time, "sleep", pause)
        return self.engine.serve()

    def signal(self) -> None:
        self.signals.record(15, None)

    def said(self, text: str) -> bool:
        return any(text in line for line in self.console.lines)


def nothing() -> None:
    """No event."""


@pytest.fixture
def life(config: Config, monkeypatch: pytest.MonkeyPatch) -> Life:
    return Life(config, monkeypatch)


def test_it_is_announced_as_one_that_nobody_restarts_and_leaves_only_when_the_coordinator_says_so(
    life,
):
    def asked() -> None:
        (entry,) = life.roster.entries()
        assert entry.leaving

    def present() -> None:
        (entry,) = life.roster.entries()
        assert (entry.url, entry.restarts, entry.leaving) == ("http://here:1", False, False)

    assert life.run(present, life.signal, asked, asked, lambda: life.roster.confirm_left(0)) == 0
    assert life.said("SIGTERM: leaving") and life.said("has left after")


def test_a_second_signal_does_not_wait(life):
    assert life.run(life.signal, life.signal) == 128 + 15
    assert life.said("stopping at once")


def test_a_coordinator_that_never_lets_it_go_is_waited_for_until_the_deadline(life, config):
    rollout = config.rollout.model_copy(
        update={
            "request_timeout_s": config.rollout.request_timeout_s
            - config.deadlines.request_limit_s
            - config.publish.timeout_s
        }
    )
    life.engine.config = config.model_copy(update={"rollout": rollout})
    assert life.run(life.signal) == 1
    assert life.said("rollout.request_timeout_s + publish.timeout_s")


def test_a_server_that_dies_is_shown_and_the_coordinator_is_told(life):
    def die() -> None:
        life.server.exit_code = 9

    assert life.run(nothing, die) == 1
    assert life.said("server ended: exit code 9") and life.said("CUDA out of memory")
    assert life.roster.entries()[0].leaving


def test_an_engine_that_the_coordinator_removed_ends_with_1(life):
    assert life.run(nothing, lambda: life.roster.confirm_left(0)) == 1
    assert life.said("the coordinator has removed this engine")


@pytest.mark.parametrize("answers", [True, False], ids=["joined", "starting"])
def test_the_end_of_the_run_is_the_end_of_the_engine(config, monkeypatch, answers):
    life = Life(config, monkeypatch, answers)

    def end() -> None:
        def gone(*args: object) -> Any:
            raise StoreError("connection closed")

        monkeypatch.setattr(life.roster._channel, "_call", gone)

    assert life.run(nothing, end) == 0
    assert life.said("the run has ended")


def test_what_ends_while_the_server_starts(config, monkeypatch):
    life = Life(config, monkeypatch, answers=False)
    assert life.run(life.signal) == 0, "nothing is lost by it"
    assert life.said("stopped before it has joined") and not life.roster.entries()

    def die() -> None:
        life.server.exit_code = 1

    life = Life(config, monkeypatch, answers=False)
    assert life.run(die) == 1 and not life.roster.entries()
    life = Life(config, monkeypatch, answers=False)
    run = config.run.model_copy(update={"startup_timeout_s": -1.0})
    life.engine.config = config.model_copy(update={"run": run})
    assert life.run() == 1 and life.said("run.startup_timeout_s")
