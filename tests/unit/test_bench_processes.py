"""Processes of a benchmark end with it, also by SIGTERM, and a failed one's log gives its error, not what came after."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.launched import running
from tools.processes import ROOT, reason_of

# Two ranks under torchrun, captured and shortened: a warning, the error twice, then torchrun's own account.
OF_RANKS = """\
/srv/train.py:3: UserWarning: Error handling of this kind is deprecated: use another
  warnings.warn("Error handling of this kind is deprecated: use another")
closing engines
[rank1]: Traceback (most recent call last):
[rank1]:   File "/srv/train.py", line 7, in <module>
[rank1]:     step()
[rank1]:   File "/srv/train.py", line 5, in step
[rank1]:     raise ValueError("per_device_train_batch_size must divide the batch")
[rank1]: ValueError: per_device_train_batch_size must divide the batch
W1122 13:19:50.790000 28551 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 28995 closing signal SIGTERM
E1122 13:19:50.911000 28551 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "/srv/lib/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
  exitcode  : 1 (pid: 28998)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
# An engine whose core process fails: the server's own traceback comes last and only points back.
OF_AN_ENGINE = """\
INFO 11-22 13:00:01 [api_server.py:100] vLLM API server version 0.32.0
(EngineCore_DP0 pid=71) ERROR 11-22 13:00:09 [core.py:842] EngineCore failed to start.
(EngineCore_DP0 pid=71) ERROR 11-22 13:00:09 [core.py:842] Traceback (most recent call last):
(EngineCore_DP0 pid=71) ERROR 11-22 13:00:09 [core.py:842]   File "/srv/core.py", line 833, in run
(EngineCore_DP0 pid=71) ERROR 11-22 13:00:09 [core.py:842] OSError: no safetensors file in /models/none
Traceback (most recent call last):
  File "/srv/api_server.py", line 9, in <module>
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: 1 leaked shared_memory objects
  warnings.warn('resource_tracker: There appear to be %d '
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (OF_RANKS, "ValueError: per_device_train_batch_size must divide the batch"),
        (OF_AN_ENGINE, "OSError: no safetensors file in /models/none"),
        ("start\nRuntimeError: the reason\nclosing engines\n", "RuntimeError: the reason"),
        ("failed: engine-0 ended: exit code 1\nall processes ended (1.2 s)\n", "failed: engine-0 ended: exit code 1"),
        ("no port is free\n/a.py:3: UserWarning: semaphores leaked\n", "no port is free"),
        ("/a.py:3: UserWarning: nothing but this\n", "/a.py:3: UserWarning: nothing but this"),
        ("", "nothing was written"),
    ],
    ids=["ranks", "engine", "no traceback", "launcher", "warning last", "warning only", "empty"],
)
def test_the_error_of_a_log_is_found_before_warnings_and_teardown(tmp_path: Path, log: str, reason: str) -> None:
    file = tmp_path / "log"
    file.write_text(log)
    assert reason_of(file) == reason


def test_what_a_benchmark_has_started_ends_when_it_is_ended_by_sigterm(tmp_path: Path) -> None:
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    program = f"""
import pathlib, sys, time
from tools.processes import end_on_sigterm, started
end_on_sigterm()
with started([sys.executable, "-c", {child!r}], pathlib.Path({str(tmp_path / "log")!r})) as process:
    print(process.pid, flush=True)
    time.sleep(60)
"""
    benchmark = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert benchmark.stdout is not None
    with benchmark:
        group = int(benchmark.stdout.readline())
        deadline = time.monotonic() + 20
        while len(members := of_group(group)) < 2:
            assert time.monotonic() < deadline, members
            time.sleep(0.05)
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(40) == 128 + signal.SIGTERM
    assert not any(map(running, members)), "neither the process nor what it started"


def of_group(group: int) -> list[int]:
    """Process ids of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            found.append(int(stat.parent.name))
    return found
