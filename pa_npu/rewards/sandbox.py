"""Runs a program that nobody has read: under limits, in an empty directory, without network, keys, or the run's files to write to.

Each run is a cell (sandbox_child.py). What isolates it depends on the system: with namespaces (as root, or where users may make
them) there is no network, the file system is read-only but for a small one in memory, and processes end with the cell; without them
the limits of the kernel alone hold (rlimits, the wall clock, the environment), which is said once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pa_npu.errors import PaNpuError

log = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("sandbox_child.py")
_GRACE_S = 5.0  # a killed cell is gone within milliseconds
_SET_UP_S = 20.0  # for a cell to begin on a machine that is busy; not part of the program's time
_FAILED, _REFUSED = 126, 125
_READ_BYTES = 1 << 16
_cells = itertools.count(os.getpid() * 1000 % 1_000_000_000)
_said: set[str] = set()


@dataclass(frozen=True)
class Limits:
    """wall_s: of the clock; cpu_s: whole seconds of processor time, of each process. memory_bytes: address space of each process.

    files_bytes: of one file, and of all with namespaces. output_bytes: of standard output, and of errors. required: refuse to run
    where the system grants no namespaces.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    files_bytes: int = 16 << 20
    output_bytes: int = 1 << 16
    processes: int = 32
    open_files: int = 64
    required: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a program ended. ended: by itself, at the wall clock, or because it wrote too much. code: 128 + n for signal n."""

    ended: Literal["itself", "timeout", "output"]
    code: int | None
    stdout: bytes
    stderr: bytes
    isolated: tuple[str, ...]


class SandboxFailed(PaNpuError):
    """No program was run: the fault is the system's, not the program's."""


async def run(arguments: Sequence[str], stdin: bytes, limits: Limits, files: Mapping[str, str]) -> Outcome:
    """This Python, isolated (-I), with these arguments, in an empty directory.

    files: written before, to be read at the paths that begin with "{files}/" in the arguments; {files}/site-packages is this
    environment's, where it is not found otherwise. Raises SandboxFailed where nothing could be run.
    """
    with tempfile.TemporaryDirectory(prefix="pa_npu-cell-") as parent:
        directory, given = Path(parent) / "work", Path(parent) / "given"
        directory.mkdir()
        given.mkdir()
        for name, text in files.items():
            (given / name).write_text(text, encoding="utf-8", errors="replace")
        # another user's, where we are root
        for path in (Path(parent), directory, given):
            path.chmod(0o755)
        directory.chmod(0o777)
        # to root's programs, which run as a user that may not read what is root's, it is shown in another place
        binds = []
        if os.geteuid() == 0:
            for name, source in (("python", sys.base_prefix), ("site-packages", sysconfig.get_path("purelib"))):
                (given / name).mkdir()
                binds.append((source, str(given / name)))
        wanted = {
            "directory": str(directory),
            "cell": next(_cells) % 1_000_000_000,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
            "files_bytes": limits.files_bytes,
            "processes": limits.processes,
            "open_files": limits.open_files,
            "required": limits.required,
            "binds": binds,
            "python": sys.executable,
            "copied_python": str(given / "python" / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"),
            "arguments": ["-I", *(part.replace("{files}", str(given)) for part in arguments)],
        }
        return await _run(wanted, stdin, limits)


async def _run(wanted: dict[str, object], stdin: bytes, limits: Limits) -> Outcome:
    reading, writing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", str(_CHILD), json.dumps(wanted), str(writing)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(writing,),
            env={},
            start_new_session=True,
        )
    except OSError as error:
        os.close(reading)
        raise SandboxFailed(f"the sandbox cannot start a process ({error.strerror})") from None
    finally:
        os.close(writing)
    try:
        return await _watch(process, reading, stdin, limits)
    finally:
        os.close(reading)
        # it kills all of the program, and then ends; only where it does not, it is killed itself
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(end)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_drain(process), _GRACE_S)
                break


async def _watch(process: asyncio.subprocess.Process, report: int, stdin: bytes, limits: Limits) -> Outcome:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    isolated, refused = await _isolation(report, process)
    if refused is not None and refused not in _said:
        _said.add(refused)
        log.warning(
            "rewards: this system grants no namespaces (%s): programs that responses hold run under limits, but with the network "
            "of this machine, and may write what this user may; set reward.code.isolation=required to refuse that",
            refused,
        )
    started_s = time.monotonic()
    feeding = asyncio.create_task(_feed(process.stdin, stdin), name="sandbox input")
    readers = [
        asyncio.create_task(_read(stream, limits.output_bytes), name="sandbox output")
        for stream in (process.stdout, process.stderr)
    ]
    ended: Literal["itself", "timeout", "output"] = "itself"
    try:
        waiting = asyncio.ensure_future(_all_read(readers))
        done, _ = await asyncio.wait({waiting}, timeout=max(0.0, limits.wall_s - (time.monotonic() - started_s)))
        if not done:
            ended = "timeout"
        elif not waiting.result():
            ended = "output"
        else:
            left_s = max(0.0, limits.wall_s - (time.monotonic() - started_s))
            try:
                await asyncio.wait_for(process.wait(), left_s)
            except asyncio.TimeoutError:
                ended = "timeout"
        outputs = [bytes(reader.result()[0]) if reader.done() else b"" for reader in readers]
    finally:
        for task in (feeding, waiting, *readers):
            task.cancel()
        await asyncio.gather(feeding, waiting, *readers, return_exceptions=True)
    code = process.returncode if ended == "itself" else None
    if code == _FAILED and b"the sandbox failed" in outputs[1]:
        raise SandboxFailed(outputs[1].decode(errors="replace").strip())
    if code == _REFUSED and limits.required and refused is not None:
        raise SandboxFailed(f"reward.code.isolation: required, but this system grants no namespaces ({refused})")
    return Outcome(ended, code, outputs[0], outputs[1], isolated)


async def _isolation(report: int, process: asyncio.subprocess.Process) -> tuple[tuple[str, ...], str | None]:
    """What the cell says before it begins."""
    try:
        line = await asyncio.wait_for(asyncio.to_thread(os.read, report, _READ_BYTES), _SET_UP_S)
    except asyncio.TimeoutError:
        process.kill()  # the thread ends with the pipe
        raise SandboxFailed(f"the sandbox was not set up within {_SET_UP_S:.0f} s") from None
    if not line:
        assert process.stderr is not None
        said = (await process.stderr.read(1000)).decode(errors="replace").strip()
        raise SandboxFailed(f"the sandbox did not begin: {said or 'it ended'}")
    found = json.loads(line)
    return tuple(found["isolated"]), found["refused"]


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Reads what a killed process had written: its end is not seen before."""
    for stream in (process.stdout, process.stderr):
        while stream is not None and await stream.read(_READ_BYTES):
            pass
    await process.wait()


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        stream.write(data)
        await stream.drain()
        stream.close()


async def _read(stream: asyncio.StreamReader, most: int) -> tuple[bytearray, bool]:
    """What is written, and whether it is no more than may be."""
    found = bytearray()
    while part := await stream.read(_READ_BYTES):
        found += part
        if len(found) > most:
            return found[:most], False
    return found, True


async def _all_read(readers: Sequence[asyncio.Task[tuple[bytearray, bool]]]) -> bool:
    """Whether all ended within what they may write; as soon as one did not, no."""
    for reader in asyncio.as_completed(readers):
        if not (await reader)[1]:
            return False
    return True
