"""The API key of a run's engines: random for every run, known to engines and coordinator only.

It reaches processes through their environment (VLLM_API_KEY), never through a command line, a log
or config.yaml. While engines run, a file that only the user can read holds it, for whoever attaches
to them or uses the gateway.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from pa_npu.config.plain_file import read_plain, reason
from pa_npu.config.schema import Config
from pa_npu.engines.http_server import KEY_FILE, KEY_VARIABLE
from pa_npu.errors import ConfigError, UserError

_LONGEST_KEY_FILE_BYTES = 4096


def engine_key(config: Config) -> str:
    """Returns the key of the attached engines, or that of the engines to start: the user's own if
    there is one, else a new one.

    Empty where attached engines have none that is known. Raises UserError when the key cannot be
    sent.
    """
    users = os.environ.get(KEY_VARIABLE, "")
    if users or config.rollout.attach:
        return checked_key(users, KEY_VARIABLE)
    return secrets.token_hex(32)


@contextlib.contextmanager
def key_file(directory: Path, key: str) -> Iterator[Path]:
    """DIRECTORY/api_key with mode 0600, for as long as the context lasts."""
    file = directory / KEY_FILE
    file.unlink(missing_ok=True)  # a killed launcher's, whose mode might be another
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(key + "\n")
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def run_key_file(
    config: Config, directory: Path, key: str
) -> contextlib.AbstractContextManager[object]:
    """RUN/api_key, for engines that the run starts, and for its gateway: with a new key where the
    engines' is not known.
    """
    if not config.rollout.has_engines:
        return contextlib.nullcontext()
    has_gateway = config.environment.has_gateway or config.agent.port is not None
    if config.rollout.attach and not has_gateway:
        return contextlib.nullcontext()
    return key_file(directory, key or secrets.token_hex(32))


def run_key(config: Config) -> str:
    """Returns the run's key on a cluster's node: from the shared run directory, or the user's own.

    Raises UserError when there is neither.
    """
    file = Path(config.run.dir) / KEY_FILE
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return checked_key(file.read_text(encoding="utf-8").strip(), str(file))
    users = os.environ.get(KEY_VARIABLE, "")
    if not users:
        raise UserError(
            f"{KEY_VARIABLE}: the engines' key cannot be read from {file}; start the cluster as "
            f"the user who starts the run, or with {KEY_VARIABLE} in its nodes' environment"
        )
    return checked_key(users, KEY_VARIABLE)


def read_key(path: str | Path, where: str, remedy: str) -> str:
    """Returns the key in a file.

    Raises ConfigError that begins with `where` and ends with `remedy`; the key itself is in no
    message.
    """
    try:
        text = read_plain(path, _LONGEST_KEY_FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {path} cannot be read ({reason(error)}); {remedy}") from None
    if not text.strip():
        raise ConfigError(f"{where}: {path} is empty; {remedy}")
    return checked_key(text.strip(), f"{where}: {path}")


def checked_key(key: str, where: str) -> str:
    """Returns the key if an HTTP header can hold it. No message shows the key."""
    if not all("!" <= character <= "~" for character in key):
        raise UserError(
            f"{where}: the API key holds spaces or characters beyond ASCII, which an HTTP header "
            "cannot; choose another"
        )
    return key
