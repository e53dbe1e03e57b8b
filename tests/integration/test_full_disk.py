"""A disk that fills up during a run costs records and checkpoints; what ends the run is the last checkpoint, in one line."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launched import Launched, settings

pytestmark = [
    pytest.mark.integration,
    # the parts: unit/test_checkpoints_trainer.py and unit/test_telemetry_lost_records.py
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system in memory"),
]

ITERATIONS = 6
RUN_TIMEOUT_S = 400.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 64 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, timeout=30)
    except OSError as error:
        pytest.skip(f"mount: {error}")
    if mounted.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=30)


def fill(filler: Path) -> None:
    """Takes all that is left."""
    with filler.open("wb", buffering=0) as stream:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while stream.write(b"x" * size) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


def iterations(run_dir: Path) -> list[int]:
    return [
        json.loads(line)["iteration"]
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_run_on_a_full_disk_goes_on_until_its_last_checkpoint_and_later_from_the_last_whole_one(
    tiny: Path, small_disk: Path, tmp_path: Path
) -> None:
    run_dir, filler = small_disk / "run", small_disk / "filler"
    arguments = settings(tiny, run_dir, schedule__iterations=ITERATIONS, checkpoint__every=1)
    run = Launched(tmp_path, "run", *arguments)
    try:
        run.wait_for(
            lambda: "iteration 1 (2/" in run.output, "two iterations are done", RUN_TIMEOUT_S
        )
        fill(filler)
        code = run.popen.wait(RUN_TIMEOUT_S)
    finally:
        run.close()
    output = run.output
    assert code == 1, output
    assert "Traceback" not in output
    assert "starting coordinator and trainers again" not in output, (
        "another attempt finds the same disk"
    )
    (reason,) = {
        line.partition("CheckpointError: ")[2]
        for line in output.splitlines()
        if "CheckpointError: " in line
    }
    assert f"the last checkpoint, of version {ITERATIONS}, could not be written" in reason, (
        "the work goes on to its end"
    )
    assert "No space left on device" in reason and "checkpoint.resume=auto" in reason
    lost = [
        line.partition(": cannot be written")[0]
        for line in output.splitlines()
        if "goes on without these records" in line
    ]
    assert len(lost) == len(set(lost)), (
        f"one line for each kind of records, however many are lost:\n{output}"
    )
    filler.unlink()
    again = Launched(tmp_path, "run", *arguments, "checkpoint.resume=auto")
    try:
        assert again.popen.wait(RUN_TIMEOUT_S) == 0, again.output
    finally:
        again.close()
    done = iterations(run_dir)
    assert done == list(range(ITERATIONS)), (
        "every iteration is recorded once, those of the full disk by the second run"
    )
    assert (run_dir / "hf" / "config.json").is_file()
