"""Which distributions an engine's interpreter has, without importing them: an engine may live in an environment of its own."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shutil
import subprocess

from pa_npu.errors import ConfigError

_TIMEOUT_S = 60.0


@functools.cache
def distributions(python: str | None, names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those of `names` that an interpreter has (None: this one); asked once. Raises ConfigError."""
    if python is None:
        return _here(names)
    if shutil.which(python) is None:
        raise ConfigError(f"rollout.python: {python} is not an executable; give the path of a Python interpreter")
    program = _PROGRAM.format(names=names)
    try:
        reply = subprocess.run([python, "-c", program], capture_output=True, timeout=_TIMEOUT_S, check=True)
        return dict(json.loads(reply.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"rollout.python: {python} does not run ({error}); give a working interpreter") from None


def _here(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# importlib.metadata alone: importing an engine takes half a minute
_PROGRAM = """
import importlib.metadata as metadata, json
found = {{}}
for name in {names!r}:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
