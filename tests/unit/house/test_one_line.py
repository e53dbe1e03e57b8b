"""What is wrong outside of a run is one line with its own cause, whatever libraries print or say of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from pa_npu.errors import DataError, UserError
from pa_npu.families import model_directory
from pa_npu.families.model_directory import load_tokenizer, read_header
from pa_npu.launcher import join


def test_a_joining_engine_that_meets_no_store_says_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch prints C++ stack traces into the terminal, past Python."""
    monkeypatch.setattr(join, "_CONNECT_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, name="no store", daemon=True).start()
        port = server.getsockname()[1]
        asked = join.BoundedCalls("store calls", 10.0)
        with pytest.raises(UserError, match="no run of pa_npu answers there"):
            join.find_run(("127.0.0.1", port), "the run", asked)
        subprocess.run(["sh", "-c", "echo heard >&2"], check=True)
        assert capfd.readouterr().err == "heard\n", (
            "nothing before it, and the terminal is itself again"
        )


def test_the_terminal_is_kept_from_native_code_only_while_that_runs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with join._without_traces():
        os.write(2, b"a stack trace\n")
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "afterwards\n"


def test_an_unreadable_configuration_is_not_blamed_on_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "num_hidden_layers": "x"})
    )
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"transformers cannot read its config\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(DataError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_weights_without_permission_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(model_directory, "open_plain", denied)
    with pytest.raises(
        DataError, match="cannot be read \\(permission denied\\); let the user of the run read it"
    ):
        read_header(tmp_path / "model.safetensors")
