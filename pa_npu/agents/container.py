"""Containers of agent programs: the commands of docker, or podman, that run a program in an image and remove what is left of it.

The program has the variables of the gateway and none of the coordinator's. It shares the machine's network, since the gateway
listens on loopback, unless an option in agent.container says another; it has no capabilities and cannot gain any.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Sequence

from pa_npu.config.sections import AgentConfig
from pa_npu.errors import ConfigError

_PROGRAMS = ("docker", "podman")
_USUAL = ("--memory=4g", "--cpus=2", "--pids-limit=512")  # of one that is given too, docker and podman take the last
_NETWORK = ("--network", "--net")
_SIGNAL = 128  # and its number: the exit code of a container whose program a signal killed


class Containers:
    """Raises ConfigError where neither program is on PATH."""

    def __init__(self, settings: AgentConfig) -> None:
        assert settings.container is not None
        self._program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
        if self._program is None:
            raise ConfigError(
                f"agent.container: {settings.container} needs docker or podman, and neither is on PATH; install one, or remove the "
                f"key, so that programs run in processes"
            )
        *given, self._image = settings.container.split()
        own = any(option.partition("=")[0] in _NETWORK for option in given)
        self._options = [*_USUAL, *([] if own else ["--network=host"]), *given]

    def commands(self, command: Sequence[str], variables: Iterable[str]) -> tuple[list[str], list[str]]:
        """Returns the command that runs a program in a container of its own, and the one that removes it.

        variables: names of what it inherits.
        """
        assert self._program is not None
        name = f"pa_npu-agent-{secrets.token_hex(8)}"
        fixed = ["--rm", "--init", f"--name={name}", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        given = [f"--env={variable}" for variable in variables]
        run = [self._program, "run", *fixed, *given, *self._options, self._image, *command]
        return run, [self._program, "rm", "--force", name]

    @staticmethod
    def exit_code(code: int) -> int:
        """The program's, negative for a signal, from the container's."""
        return _SIGNAL - code if code > _SIGNAL else code
