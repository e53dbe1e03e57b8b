"""Checkpoint directories: complete or not there, the newest usable one, retention; without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import example, given

from pa_npu.checkpoints import directories as store
from pa_npu.checkpoints.directories import digest_of
from pa_npu.errors import UserError
from tests.helpers.mutations import json_near


def make_meta(version: int, directory: Path) -> store.CheckpointMeta:
    return store.CheckpointMeta(
        version=version,
        updates=version,
        data={"position": 4 * version, "fingerprint": "prompts"},
        seed=1,
        layout={"devices": 1},
        model={"path": "model", "fingerprint": "weights"},
        reference=None,
        config={"run": {"seed": 1}},
        config_digest="digest",
        files=store.list_files(directory),
        digests={name: digest_of(directory / name) for name in store.list_files(directory)},
    )


def write(parent: Path, version: int, shard: bytes = b"weights") -> Path:
    directory = store.start(parent, version)
    (directory / "__0_0.distcp").write_bytes(shard)
    (directory / ".metadata").write_bytes(b"index")
    return store.commit(directory, make_meta(version, directory))


def test_a_committed_checkpoint_is_complete_and_its_meta_data_come_back(tmp_path: Path) -> None:
    path = write(tmp_path, 4)
    assert path == tmp_path / "iteration_000004" and store.problem(path) is None
    meta = store.read_meta(path)
    assert meta == make_meta(4, path)
    assert meta.files == {"__0_0.distcp": 7, ".metadata": 5}
    assert [entry.name for entry in tmp_path.iterdir()] == ["iteration_000004"]


def damage_shard(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes(b"wei")


def remove_shard(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def truncate_meta(path: Path) -> None:
    file = path / store.META_FILE
    file.write_text(file.read_text()[:40])


def drop_key(path: Path) -> None:
    file = path / store.META_FILE
    values = json.loads(file.read_text())
    del values["data"]
    file.write_text(json.dumps(values))


def drop_fingerprint(path: Path) -> None:
    file = path / store.META_FILE
    values = json.loads(file.read_text())
    del values["model"]["fingerprint"]
    file.write_text(json.dumps(values))


def replace_by_list(path: Path) -> None:
    (path / store.META_FILE).write_text("[]")


def remove_meta(path: Path) -> None:
    (path / store.META_FILE).unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_shard, "__0_0.distcp has 3 bytes instead of 7"),
        (remove_shard, "__0_0.distcp is missing"),
        (truncate_meta, "pa_npu.json is damaged"),
        (drop_key, "no valid 'data'"),
        (drop_fingerprint, "its model has no path or no fingerprint"),
        (replace_by_list, "not an object"),
        (remove_meta, "pa_npu.json cannot be read (No such file or directory)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_newest_checkpoint_is_skipped_with_one_line_and_the_next_older_is_taken(
    damage: object, reason: str, tmp_path: Path
) -> None:
    older, newest = write(tmp_path, 2), write(tmp_path, 4)
    assert store.newest(tmp_path) == (newest, "")
    damage(newest)  # type: ignore[operator]
    actual, output = store.newest(tmp_path)
    assert (
        actual == older
        and output.count("is skipped") == 1
        and str(newest) in output
        and reason in output
    )
    with pytest.raises(
        UserError, match=r"checkpoint.load: .* is not a complete checkpoint: .*; give another"
    ):
        store.read_meta(newest)


@pytest.mark.parametrize("named", [".", "checkpoints"])
def test_a_run_in_place_of_a_checkpoint_is_answered_with_its_newest(
    named: str, tmp_path: Path
) -> None:
    write(tmp_path / "checkpoints", 2)
    newest = write(tmp_path / "checkpoints", 4)
    with pytest.raises(UserError, match="it holds 2 checkpoints; give the newest,") as refused:
        store.read_meta(tmp_path / named)
    assert str(refused.value).endswith(str(newest))


def test_a_directory_that_is_not_there_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such directory"):
        store.read_meta(tmp_path / "iteration_000004")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("fuzz"), 4)


META = asdict(make_meta(4, Path("nowhere"))) | {"files": {"__0_0.distcp": 7, ".metadata": 5}}


@given(content=json_near(META))
@example(content=b"[" * 100_000)
@example(content=json.dumps(META | {"files": {"a\0b": 1}}).encode())
@example(content=json.dumps(META | {"files": {"../../../etc/passwd": 1}}).encode())
@example(content=json.dumps(META | {"files": {"": 4096}}).encode())
@example(content=json.dumps(META | {"files": {"long" * 64: 1}}).encode())
@example(content=json.dumps(META | {"files": {"long/" * 512: 1}}).encode())
@example(content=b" " * (65 << 20))
def test_any_meta_data_are_those_of_a_checkpoint_or_what_is_wrong_in_one_line(
    written: Path, content: bytes
) -> None:
    (written / store.META_FILE).write_bytes(content)
    problem = store.problem(written)
    if problem is None:
        assert store.read_meta(written).files.items() <= {"__0_0.distcp": 7, ".metadata": 5}.items()
        return
    assert problem.isprintable() and len(problem) < 500, problem
    actual, output = store.newest(written.parent)
    assert actual is None and output.count("is skipped") == 1


def test_meta_data_that_are_a_pipe_are_not_waited_for(tmp_path: Path) -> None:
    path = write(tmp_path, 4)
    (path / store.META_FILE).unlink()
    os.mkfifo(path / store.META_FILE)
    assert store.META_FILE in (store.problem(path) or "")


def test_what_is_not_complete_is_neither_found_nor_left_behind(tmp_path: Path) -> None:
    write(tmp_path, 2)
    store.start(tmp_path, 4)
    assert store.newest(tmp_path) == (tmp_path / "iteration_000002", "")
    output = store.clean(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["iteration_000002"]
    assert output == [
        f"checkpoint {tmp_path / 'iteration_000004'}: its incomplete files are removed"
    ]
    assert (
        store.newest(tmp_path / "nowhere") == (None, "") and store.clean(tmp_path / "nowhere") == []
    )


@pytest.mark.parametrize("killed_before", [1, 2, 3])
def test_a_kill_at_any_step_of_replacing_a_checkpoint_leaves_a_complete_one_of_that_version(
    killed_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps: the old one is renamed, the new one is renamed, the old one is removed."""
    write(tmp_path, 4, b"old")
    steps = 0

    class Killed(BaseException):
        pass

    def step(original: object) -> object:
        def wrapped(*arguments: object, **options: object) -> object:
            nonlocal steps
            if str(arguments[0]).endswith((".incomplete", "iteration_000004", ".replaced")):
                steps += 1
                if steps == killed_before:
                    raise Killed
            return original(*arguments, **options)  # type: ignore[operator]

        return wrapped

    directory = store.start(tmp_path, 4)
    (directory / "__0_0.distcp").write_bytes(b"newer")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", step(Path.rename))
        real = store.shutil.rmtree
        patch.setattr(
            store.shutil,
            "rmtree",
            lambda path, **o: step(real)(path, **o) if Path(path).exists() else None,
        )
        store.commit(directory, make_meta(4, directory))
    store.clean(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["iteration_000004"]
    actual = (tmp_path / "iteration_000004" / "__0_0.distcp").read_bytes()
    assert store.problem(tmp_path / "iteration_000004") is None
    assert actual == (b"newer" if killed_before == 3 else b"old")


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "deleted"),
    [
        (0, 0, []),
        (1, 0, [1, 2, 3, 4]),
        (2, 0, [1, 2, 3]),
        (1, 1, [1, 2, 4]),
        (1, 2, [1, 4]),
        (9, 0, []),
    ],
)
def test_retention_keeps_the_last_n_and_the_best_m_evaluated(
    keep_last: int, keep_best: int, deleted: list[int], tmp_path: Path
) -> None:
    for version in range(1, 6):
        write(tmp_path, version)
    accuracy = {1: 0.2, 2: 0.5, 3: 0.5, 77: 0.9}  # 4 and 5 were not evaluated; 77 has no checkpoint
    superfluous = store.superfluous(tmp_path, keep_last, keep_best, accuracy)
    assert [store.version_of(path) for path in superfluous] == deleted


def test_a_damaged_checkpoint_does_not_count_as_one_of_the_last(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write(tmp_path, version)
    remove_shard(tmp_path / "iteration_000003")
    assert [path.name for path in store.superfluous(tmp_path, 1, 0, {})] == ["iteration_000001"]


def test_deletion_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    store.delete(path)
    assert list(tmp_path.iterdir()) == []


def test_the_module_needs_no_torch() -> None:
    code = "import sys, pa_npu.checkpoints.directories; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    "name", ["iteration_²", "iteration_٣", f"iteration_{'9' * 5000}", "iteration_", "iteration_-1"]
)
def test_a_name_that_only_looks_like_a_checkpoints_is_none(name: str) -> None:
    assert store.version_of(Path(name)) is None
    assert store.version_of(Path("iteration_000012")) == 12, "a control"
