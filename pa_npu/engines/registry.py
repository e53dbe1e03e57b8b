"""The kinds of engines by rollout.backend: how each is started, asked and checked.

For a kind of your own, write a module with an EngineKind and set rollout.backend=module:NAME.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pa_npu
from pa_npu import platform
from pa_npu.config.schema import Config
from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.config.user_code import check_name, import_object
from pa_npu.engines.protocol import RolloutEngine
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec


@dataclass(frozen=True)
class EngineCommand:
    """The command that starts an engine.

    argv: its first item is the interpreter.
    env: variables to set on top of the inherited environment.
    scratch_env: variable that names a directory of the server's own, removed with it; None if it
        needs none.
    own_tmpdir: whether that directory is its TMPDIR too.
    scratch_parent: directory in which that is made; None: the usual one for temporary files.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    scratch_env: str | None = None
    own_tmpdir: bool = False
    scratch_parent: str | None = None


@dataclass(frozen=True)
class EngineKind:
    """Everything that is particular to a kind of engine.

    Its server must fulfil the duties in pa_npu.engines.http_server.

    command: returns the command of engine `index` on `port`. Raises ConfigError if the model and
        the configuration cannot go together, UserError if the installed engine is not supported.
    client: returns the client of the engine at a URL, for a vocabulary of so many tokens, with an
        API key.
    check_keys: raises ConfigError if configuration and model (None if unknown) ask for what the
        kind cannot do on any machine.
    check: raises UserError if the engines' interpreter cannot run what is configured.
    describe: returns what the engines' interpreter has, in words, and in one line what is missing,
        or None.
    served_model: returns the model directory that the engine at a URL was started with, given an
        API key. Raises OSError, ValueError, LookupError or TypeError if the engine does not name
        it.
    tool_parser: returns a function that finds tool calls in a text, from the parser's name and a
        tokenizer. Raises ConfigError. None if the kind has no parsers.
    merges_adapters: whether its engines load adapters that are sent alone (publish.lora=adapter,
        Receiver.whole).
    records_expert_choices: whether its engines can report which experts each token took
        (algorithm.router_replay, EngineCapabilities).
    reads_images: whether its engines take images in requests.
    """

    command: Callable[[Config, ModelSpec, int, int], EngineCommand]
    client: Callable[[str, int, str | None], RolloutEngine]
    check_keys: Callable[[Config, ModelSpec | None], None]
    check: Callable[[Config], None]
    describe: Callable[[Config | None], tuple[str, str | None]]
    served_model: Callable[[str, str], str]
    tool_parser: Callable[[str, Any], Callable[..., Any]] | None = None
    merges_adapters: bool = False
    records_expert_choices: bool = False
    reads_images: bool = False


# Names of modules, which are imported only where they are used.
_KINDS = {
    "vllm": "pa_npu.engines.vllm.kind:VLLM",
    "transformers": "pa_npu.engines.transformers.kind:TRANSFORMERS",
}

_TIMEOUT_S = 60.0
DEFAULT_BACKEND = str(RolloutConfig.model_fields["backend"].default)


def engine_kind(backend: str) -> EngineKind:
    """Returns the kind that rollout.backend names. Raises ConfigError if there is none."""
    check_name("rollout.backend", backend, _KINDS, "module:NAME")
    kind = import_object("rollout.backend", _KINDS.get(backend, backend), "module:NAME")
    if not isinstance(kind, EngineKind):
        raise ConfigError(
            f"rollout.backend: {backend} is no EngineKind; see pa_npu/engines/registry.py"
        )
    return kind


def check_engine_keys(config: Config, spec: ModelSpec | None) -> None:
    """Raises ConfigError if configuration and model ask for what the kind cannot do.

    `spec`: None if the model is unknown.
    """
    kind = engine_kind(config.rollout.backend)
    if config.publish.lora == "adapter" and not kind.merges_adapters:
        raise ConfigError(
            f"publish.lora: adapter with rollout.backend={config.rollout.backend}, whose engines "
            "merge no adapters; set publish.lora=merged"
        )
    if config.algorithm.router_replay != "none" and not kind.records_expert_choices:
        raise ConfigError(
            f"algorithm.router_replay: {config.algorithm.router_replay} with "
            f"rollout.backend={config.rollout.backend}, whose engines do not say which experts a "
            "token took; set it to none, or rollout.backend=vllm"
        )
    kind.check_keys(config, spec)


def common_environment(config: Config, python: str) -> dict[str, str]:
    """Returns the variables of every engine, with which its interpreter finds this package."""
    device = platform.get(config.run.device)
    collectives = device.collective_environment(
        config.deadlines.longest_collective_s, config.devices.deterministic_collectives
    )
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        **device.environment("engine"),
        **collectives,
    }
    if path := _import_path(config, python):
        paths = [path, os.environ.get("PYTHONPATH")]
        env["PYTHONPATH"] = os.pathsep.join(part for part in paths if part)
    return env


def _import_path(config: Config, python: str) -> str | None:
    """Returns the directory from which an engine's interpreter can import pa_npu.

    Returns None if it can already. It is never a whole site-packages: its torch would shadow that
    of an engine with an environment of its own.
    """
    package = Path(pa_npu.__file__).resolve().parent
    if package.parent.name not in ("site-packages", "dist-packages"):
        return str(package.parent)
    if python == sys.executable:
        return None
    directory = Path(config.run.dir).resolve() / "engine_path"
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / package.name
    if not link.is_symlink():
        link.symlink_to(package, target_is_directory=True)
    return str(directory)


@functools.cache
def distributions(python: str | None, names: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of those of `names` that an interpreter has (None: this one).

    Each is asked only once. Raises ConfigError.
    """
    if python is None:
        return _here(names)
    if shutil.which(python) is None:
        raise ConfigError(
            f"rollout.python: {python} is not an executable; give the path of a Python interpreter"
        )
    # By importlib.metadata alone: importing an engine takes half a minute.
    program = (
        "import importlib.metadata, "
        f"json\n{inspect.getsource(_here)}\nprint(json.dumps(_here({names!r})))"
    )
    try:
        reply = subprocess.run(
            [python, "-c", program], capture_output=True, timeout=_TIMEOUT_S, check=True
        )
        return dict(json.loads(reply.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"rollout.python: {python} does not run ({error}); give a working interpreter"
        ) from None


def _here(names: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
