"""Runs a program in a cell of the sandbox, as a process that has given up rights first. Reads the program, writes a JSON object.

    python cell.py REQUEST      {"without": [...], "user": id | null, "limits": {...}, "landlock": newest version}

without: "sys_admin" and "setfcap" are capabilities; "bubblewrap", "nsjail", "namespaces" and
"landlock" are missing or refused.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from pa_npu.rewards import sandbox, sandbox_walls

_CAPABILITIES = {"sys_admin": 21, "setfcap": 31}
_LANDLOCK, _CLONE3 = 444, 435
_UNSHARE = {"x86_64": 272, "aarch64": 97}


def give_up(without: list[str], user: int | None) -> None:
    libc = ctypes.CDLL(None)
    for name, number in _CAPABILITIES.items():
        if name in without:
            # out of the bounding set; the effective one follows when a program is started
            assert libc.prctl(24, number, 0, 0, 0) == 0
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if "namespaces" in without:
        assert sandbox_walls.apply_filter(_refuses(_UNSHARE[os.uname().machine]))
    if "landlock" in without:
        assert sandbox_walls.apply_filter(_refuses(_LANDLOCK))
    for name in sandbox.JAILS.keys() & set(without):
        del sandbox.JAILS[name]


def _refuses(*numbers: int) -> bytes:
    """Returns a filter that refuses these system calls, and new namespaces by clone."""
    _, machine, clone, _ = sandbox_walls._MACHINES[os.uname().machine]
    answers = dict.fromkeys(numbers, sandbox_walls._REFUSE) | {
        _CLONE3: sandbox_walls._ERROR | sandbox_walls._ENOSYS
    }
    return b"".join(sandbox_walls._filter(machine, clone, answers, []))


def main() -> None:
    request = json.loads(sys.argv[1])
    if "begun" not in sys.argv and any(name in request["without"] for name in _CAPABILITIES):
        give_up([name for name in request["without"] if name in _CAPABILITIES], None)
        os.execv(sys.executable, [sys.executable, *sys.argv, "begun"])
    give_up([name for name in request["without"] if name not in _CAPABILITIES], request["user"])
    sandbox._LANDLOCK_VERSION = request.get("landlock", sandbox._LANDLOCK_VERSION)
    limits = sandbox.CellLimits(**request["limits"])
    try:
        outcome = asdict(
            asyncio.run(
                sandbox.run(["{files}/program.py"], b"", limits, {"program.py": sys.stdin.read()})
            )
        )
    except sandbox.SandboxFailed as failed:
        outcome = {"failed": str(failed)}
    json.dump(
        {
            key: value.decode() if isinstance(value, bytes) else value
            for key, value in outcome.items()
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
