"""The first jail that works carries the cells, is asked for no more than a cell shows and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pa_npu.rewards import sandbox
from pa_npu.rewards.sandbox_jails import JAILS
from tests.helpers.cells import cell, level_here, readable_python

STAND_IN = """#!{python}
import json, os, sys
with open({record!r}, "a") as file:
    file.write(json.dumps(sys.argv) + chr(10))
sys.exit({status}) if {status} else os.execv(sys.argv[sys.argv.index("--") + 1], sys.argv[sys.argv.index("--") + 1 :])
"""


@pytest.fixture
def jail_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory in which jails are looked for, where everybody may read."""
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(0o777 if path == tmp_path else 0o755)
    monkeypatch.setattr(sandbox, "_JAIL_PATH", str(tmp_path))
    python = readable_python()
    monkeypatch.setattr(sandbox, "_shown", lambda: (python, [], ["/usr/bin", "/usr/lib"]))
    sandbox._jail.cache_clear()
    yield tmp_path
    sandbox._jail.cache_clear()


def stand_in(directory: Path, file: str, status: int) -> Path:
    """Puts a program in the place of a jail that records its command line, and fails or starts what
    it is given.
    """
    record = directory / f"{file}.commands"
    record.touch()
    record.chmod(0o666)
    program = directory / file
    program.write_text(STAND_IN.format(python=readable_python(), record=str(record), status=status))
    program.chmod(0o755)
    return record


@pytest.mark.parametrize(
    ("statuses", "chosen"),
    [
        ({"bwrap": 0, "nsjail": 0}, "bubblewrap"),
        ({"bwrap": 1, "nsjail": 0}, "nsjail"),
        ({"nsjail": 0}, "nsjail"),
        ({"nsjail": 3}, None),
        ({}, None),
    ],
)
def test_the_first_jail_that_works_carries_the_cells(
    statuses: dict[str, int], chosen: str | None, jail_path: Path
) -> None:
    for file, status in statuses.items():
        stand_in(jail_path, file, status)
    actual = sandbox._jail()
    assert (actual and actual[0]) == chosen


@pytest.mark.parametrize("name", JAILS)
def test_a_jail_is_asked_for_no_more_than_a_cell_shows(name: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("usr/lib")
    cell = {
        "shown": ["/usr/lib", str(link)],
        "program_files": "/given",
        "directory": "/work",
        "files_bytes": 5,
        "num_files": 3,
    }
    command = JAILS[name][1]("/jail", cell, ["/child.py"], 7)
    text = " ".join(command)
    if name == "bubblewrap":
        read_only = [
            "--ro-bind /usr/lib /usr/lib",
            f"--symlink usr/lib {link}",
            "--ro-bind /given /given",
        ]
        read_only += [
            "--ro-bind /child.py /child.py",
            "--size 5 --tmpfs /work",
            "--remount-ro /",
            "--unshare-all",
        ]
        assert "--bind " not in text.replace("--ro-bind ", "") and "--share-net" not in text
    else:
        read_only = [
            "--bindmount_ro /usr/lib",
            f"--symlink usr/lib:{link}",
            "--bindmount_ro /given",
            "--pass_fd 7",
        ]
        read_only += [
            "--bindmount_ro /child.py",
            "--mount none:/work:tmpfs:size=5,nr_inodes=4,mode=1777",
        ]
        writable = [
            command[place + 1] for place, word in enumerate(command) if word == "--bindmount"
        ]
        assert writable == [
            f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")
        ]
        assert not {
            "--rw",
            "--keep_env",
            "--keep_caps",
            "--disable_no_new_privs",
            "--chroot",
        } & set(command)
        assert "--disable_clone" not in text, "every namespace is new"
    for part in read_only:
        assert part in text


def test_cells_that_nsjail_carries_leave_no_directories_behind() -> None:
    before = set(Path("/tmp").glob("nsjail.*"))
    level_here("root with nsjail", cell("root with nsjail", "print(1)"))
    assert set(Path("/tmp").glob("nsjail.*")) <= before
