"""Engine kinds by rollout.backend: which there are, what is said of others, and that one more takes one file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pa_npu
from pa_npu.config.schema import Config
from pa_npu.engines.registry import DEFAULT_BACKEND, EngineKind, engine_kind
from pa_npu.errors import ConfigError

PACKAGE = Path(pa_npu.__file__).parent


def test_vllm_is_the_default_and_all_kinds_can_be_had():
    assert DEFAULT_BACKEND == "vllm"
    assert all(isinstance(engine_kind(name), EngineKind) for name in ("vllm", "transformers"))


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("sglang", "'sglang' is none of vllm, transformers and not module:NAME"),
        ("no.such.module:KIND", "cannot be imported .*ModuleNotFoundError"),
        ("pa_npu.errors:FAILED", "is no EngineKind"),
        ("pa_npu.errors:NO_TOKENS", "cannot be imported .*AttributeError"),
    ],
)
def test_a_backend_that_is_none_is_refused_in_one_line(backend, problem):
    with pytest.raises(ConfigError, match=f"rollout.backend: .*{problem}") as raised:
        engine_kind(backend)
    assert "\n" not in str(raised.value)


def test_a_kind_of_a_users_own_is_one_file(tmp_path, monkeypatch):
    """And what uses kinds takes it: the command of a run's engine is its command."""
    (tmp_path / "my_engine.py").write_text(
        "from pa_npu.engines.registry import EngineCommand, EngineKind\n"
        "KIND = EngineKind(\n"
        "    command=lambda config, spec, index, port: EngineCommand(('my-server', str(port)), "
        "{'MINE': '1'}),\n"
        "    client=lambda url, vocab_size, key: None,\n"
        "    check_keys=lambda config, spec: None,\n"
        "    check=lambda config: None,\n"
        "    describe=lambda config: ('mine', None),\n"
        "    served_model=lambda url, key: '/model',\n"
        ")\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from pa_npu.launcher.placement import Placement
    from pa_npu.launcher.process import commands
    from pa_npu.platform import get
    from tests.unit.engines.test_vllm_command import SPEC

    config = Config.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": "/m"},
            "data": {"train": "t"},
            "rollout": {"backend": "my_engine:KIND"},
        }
    )
    placement = Placement(((0,),), (1,), ((0,),), ((1,),), engines=(0,))
    command = commands.engine_command(config, SPEC, get("cpu"), placement, 0, 8123, "key")
    assert command.argv == ("my-server", "8123") and command.env["MINE"] == "1"


def test_nothing_outside_the_rooms_of_engines_knows_one():
    """By imports; the registry names their modules, and imports them where they are asked for."""
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                for kind in ("vllm", "transformers"):
                    if name.startswith(f"pa_npu.engines.{kind}") and room[:2] != ("engines", kind):
                        wrong.append(f"{'/'.join(room)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_registry_imports_no_engine():
    code = (
        "import sys, pa_npu.engines.registry; print([n for n in sys.modules if "
        "n.startswith('pa_npu.engines.')])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "vllm" not in output and "transformers" not in output
