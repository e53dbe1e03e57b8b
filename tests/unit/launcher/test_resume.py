"""Which checkpoint a run continues from, what may have changed since, and what happens to what it wrote before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

from pa_npu.checkpoints import directories as store
from pa_npu.checkpoints.directories import digest_of
from pa_npu.checkpoints.provenance import (
    CHANGES,
    REFUSED,
    Change,
    change_of,
    check_continuation,
    config_digest,
    config_tree,
    differences,
    fingerprints,
)
from pa_npu.config.keys import all_keys
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.coordinator.record import RunRecords
from pa_npu.coordinator.start import first_version
from pa_npu.errors import ConfigError, UserError
from pa_npu.launcher.cli import main
from pa_npu.launcher.run import Plan
from pa_npu.launcher.run_directory import (
    check_checkpoint,
    check_run_directory,
    done_line,
    hint_to_continue,
    own_run_directory,
    resolve_resume,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(range(200)))
    return directory


def make_config(model: Path, tmp_path: Path, /, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model)},
        "data": {"train": "t"},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


def write(config: Config, version: int, parent: Path | None = None) -> Path:
    directory = store.start(parent or Path(config.run.dir) / "checkpoints", version)
    (directory / "shard").write_bytes(b"weights")
    meta = store.CheckpointMeta(
        version=version,
        updates=version,
        data={"position": version, "fingerprint": ""},
        seed=config.run.seed,
        layout={"devices": 1},
        model=fingerprints(config),
        reference=None,
        config=config_tree(config),
        config_digest=config_digest(config),
        files=store.list_files(directory),
        digests={name: digest_of(directory / name) for name in store.list_files(directory)},
    )
    return store.commit(directory, meta)


AUTO = {"resume": "auto"}


def test_auto_takes_the_newest_complete_checkpoint_of_the_run_and_says_which_it_skipped(
    model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path, checkpoint=AUTO)
    older = write(config, 2)
    newest = write(config, 4)
    (newest / "shard").unlink()
    lines: list[str] = []
    resolved = resolve_resume(config, lines.append)
    assert resolved.checkpoint.load == str(older) and first_version(resolved) == 2
    assert lines == [
        f"checkpoint {newest} is skipped: shard is missing; the run continues from {older}"
    ]
    assert resolved.model_copy(update={"checkpoint": config.checkpoint}) == config, (
        "nothing else has changed"
    )
    write(config, 6)
    assert first_version(resolve_resume(resolved, lines.append)) == 6, "once more, after a restart"


def test_a_newest_checkpoint_of_damaged_content_is_found_out_and_the_next_older_one_taken(
    model: Path, tmp_path: Path
) -> None:
    """As the launcher does when trainers have refused what the first attempt gave them."""
    config = make_config(model, tmp_path, checkpoint=AUTO)
    older = write(config, 2)
    newest = write(config, 4)
    plan = Plan(resolve_resume(config, print), *[cast(Any, None)] * 5)
    assert plan.config.checkpoint.load == str(newest) and not plan.is_damaged(0), (
        "a control: nothing is wrong yet"
    )
    (newest / "shard").write_bytes(b"weightz")
    assert plan.is_damaged(0) and plan.newest_checkpoint() == older and not plan.is_damaged(1)
    lines: list[str] = []
    resolved = resolve_resume(config, lines.append, restart=True, damaged=plan.damaged)
    assert first_version(resolved) == 2
    (line,) = lines
    assert line.startswith(
        f"checkpoint {newest} is skipped: shard is not what was written (sha256 "
    )
    assert line.endswith(f"; the run continues from {older}")

    explicit = make_config(model, tmp_path, checkpoint={"load": str(newest)})
    assert not Plan(explicit, *[cast(Any, None)] * 5).is_damaged(0), (
        "who names a checkpoint gets that one or a refusal"
    )


def test_without_a_checkpoint_auto_begins_where_the_run_would_have_begun(
    model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path, checkpoint=AUTO)
    lines: list[str] = []
    assert resolve_resume(config, lines.append) == config and first_version(config) == 0
    assert not lines, "a first run has nothing to tell"
    assert (
        resolve_resume(config, lines.append, restart=True) == config
        and "the run starts from the beginning" in lines[0]
    )
    another = write(config, 7, tmp_path / "another run")
    from_other = make_config(model, tmp_path, checkpoint={**AUTO, "load": str(another)})
    assert resolve_resume(from_other, print) == from_other and first_version(from_other) == 7
    write(config, 2)
    assert first_version(resolve_resume(from_other, print)) == 2, "the run itself has come further"


def test_only_auto_or_a_restart_looks_for_checkpoints(model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path)
    path = write(config, 2)
    assert resolve_resume(config, print).checkpoint.load is None
    assert resolve_resume(config, print, restart=True).checkpoint.load == str(path)


def test_the_key_can_be_written_on_the_command_line(model: Path) -> None:
    overrides = [f"model.path={model}", "data.train=t", "checkpoint.resume=auto"]
    assert load_config([], overrides).checkpoint.resume == "auto"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"run": {"seed": 9}},
            r"run.seed: .* was written with 1, and the data order .*; restore the value",
        ),
        ({"model": {"dtype": "fp32"}}, r"model.dtype: .* was written with \"bf16\""),
        (
            {"trainer": {"distributed_optimizer": False}},
            r"trainer.distributed_optimizer: .* was written with true",
        ),
        (
            {"schedule": {"iterations": 1}},
            r"is after 2 iterations, more than schedule.iterations = 1",
        ),
    ],
)
def test_a_checkpoint_that_would_mean_something_else_is_refused(
    sections: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    path = write(make_config(model, tmp_path), 2)
    with pytest.raises(ConfigError, match=message):
        check_checkpoint(make_config(model, tmp_path, checkpoint={"load": str(path)}, **sections))


def test_another_model_is_refused_and_the_same_at_another_path_is_not(
    model: Path, tmp_path: Path
) -> None:
    path = write(make_config(model, tmp_path), 2)
    load = {"load": str(path)}
    moved = model.rename(tmp_path / "moved")
    check_checkpoint(make_config(moved, tmp_path, checkpoint=load))
    (moved / "model.safetensors").write_bytes(bytes(range(200))[::-1])
    with pytest.raises(
        ConfigError, match=r"model.path: .*moved is not the model that .* began with"
    ):
        check_checkpoint(make_config(moved, tmp_path, checkpoint=load))


def test_what_changed_is_named_with_its_former_value(model: Path, tmp_path: Path) -> None:
    saved = make_config(model, tmp_path)
    changed = make_config(
        model,
        tmp_path,
        run={"dir": "elsewhere"},
        optimizer={"learning_rate": 1e-3},
        trainer={"devices": 2},
        telemetry={"project": "other"},
    )
    assert check_continuation(config_tree(saved), saved, "C") is None
    assert check_continuation(config_tree(saved), changed, "C") == (
        "C was written with optimizer.learning_rate=1e-06, trainer.devices=1"
    )
    assert config_digest(saved) != config_digest(changed)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_a_schedule_that_more_iterations_stretch_is_said(
    decay: str, model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path, optimizer={"decay": decay}, schedule={"iterations": 8})
    longer = make_config(model, tmp_path, optimizer={"decay": decay}, schedule={"iterations": 12})
    line = check_continuation(config_tree(config), longer, "C") or ""
    assert "schedule.iterations=8" in line
    stretched = f"the {decay} decay of the learning rate now ends at iteration 12 instead of 8"
    assert (stretched in line) == (decay != "constant")


def test_a_run_goes_on_in_its_directory_at_other_sizes_but_not_as_another_run(
    model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path)
    with own_run_directory(config):
        path = write(config, 2)
    load = {"load": str(path)}
    check_run_directory(
        make_config(model, tmp_path, checkpoint=load, trainer={"devices": 2, "tensor_parallel": 2})
    )
    with pytest.raises(
        ConfigError, match=r"another configuration \(different: optimizer.learning_rate\)"
    ):
        check_run_directory(
            make_config(model, tmp_path, checkpoint=load, optimizer={"learning_rate": 1.0})
        )
    with pytest.raises(ConfigError, match=r"another configuration \(different: trainer.devices"):
        check_run_directory(make_config(model, tmp_path, trainer={"devices": 2}))
    check_run_directory(make_config(model, tmp_path, checkpoint=AUTO))


def test_a_continued_run_keeps_its_records_and_tidies_up_what_was_half_written(
    model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path, checkpoint=AUTO, telemetry={"trackers": []})
    output: list[str] = []
    with own_run_directory(config, output.append) as directory, RunRecords(config, 0) as records:
        write(config, 2)
        write(config, 4)
        (directory / "checkpoints" / "iteration_000004" / "shard").unlink()
        store.start(directory / "checkpoints", 6)
        for iteration in range(5):
            records.write_iteration(make_record(iteration), [{"iteration": iteration, "index": 0}])
    assert output == []

    resolved = resolve_resume(config, output.append)
    with (
        own_run_directory(resolved, output.append) as directory,
        RunRecords(resolved, first_version(resolved)),
    ):
        assert [path.name for path in (directory / "checkpoints").iterdir()] == ["iteration_000002"]
        for name in ("metrics.jsonl", "samples.jsonl"):
            lines = (directory / name).read_text().splitlines()
            assert [json.loads(line)["iteration"] for line in lines] == [0, 1], name
    assert (directory / "earlier" / "1" / "checkpoints" / "iteration_000004").is_dir()
    assert not (directory / "earlier" / "1" / "metrics.jsonl").exists(), "records were set aside"
    assert len(output) == 3 and "iteration_000006: its incomplete files are removed" in output[1], (
        output
    )


def make_record(iteration: int) -> dict[str, Any]:
    numbers = dict.fromkeys(
        ("accuracy", "reward", "loss", "tpspd", "iteration_s", "publish_s"), 1.0
    )
    return {"iteration": iteration, "version": iteration, **numbers}


def test_an_explicit_checkpoint_that_is_damaged_is_refused_before_anything_starts(
    model: Path, tmp_path: Path
) -> None:
    path = write(make_config(model, tmp_path), 2)
    (path / "shard").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"checkpoint.load: .*shard has 0 bytes instead of 7; give another"
    ):
        check_checkpoint(make_config(model, tmp_path, checkpoint={"load": str(path)}))


def test_a_checkpoint_that_failed_is_said_on_the_console(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(model, tmp_path, telemetry={"trackers": []})
    with RunRecords(config, 0) as records:
        records.write_iteration(make_record(0), [])
        assert "checkpoint" not in capsys.readouterr().out
        records.write_iteration({**make_record(1), "checkpoint_failed": 2}, [])
    assert (
        "| checkpoint of version 2 could not be written: see logs/trainer-0.log"
        in capsys.readouterr().out
    )


def test_a_teacher_that_has_changed_ends_a_run_that_would_go_on(
    model: Path, tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text("{}")
    (teacher / "model.safetensors").write_bytes(bytes(200))
    sections = {"algorithm": {"name": "distill"}, "teacher": {"a": {"model": str(teacher)}}}
    config = make_config(model, tmp_path, **sections)
    load = {"load": str(write(config, 2))}
    check_checkpoint(make_config(model, tmp_path, checkpoint=load, **sections))
    moved = teacher.rename(tmp_path / "elsewhere")
    elsewhere = {**sections, "teacher": {"a": {"model": str(moved)}}}
    check_checkpoint(make_config(model, tmp_path, checkpoint=load, **elsewhere))
    (moved / "model.safetensors").write_bytes(bytes(199) + b"1")
    with pytest.raises(ConfigError, match=r"teacher.a.model: .* is not the teacher that .* learnt"):
        check_checkpoint(make_config(model, tmp_path, checkpoint=load, **elsewhere))


def test_every_key_of_the_configuration_is_decided() -> None:
    keys = {key.name for key in all_keys()}
    assert set(CHANGES) == keys, (
        f"decide {sorted(keys ^ set(CHANGES))} in pa_npu/checkpoints/provenance.py"
    )
    assert {key for key, change in CHANGES.items() if change is Change.NEVER} == set(REFUSED), (
        "each with its reason"
    )
    assert change_of("rollout.env.NAME") is CHANGES["rollout.env"]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_run_that_ended_for_want_of_restarts_or_patience_goes_on_with_more(
    has_checkpoint: bool, model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path, checkpoint=AUTO)
    with own_run_directory(config):
        if has_checkpoint:
            write(config, 2)
    more = {
        "rollout": {"probe_timeout_s": 600},
        "run": {"restarts": 9},
    }
    again = resolve_resume(make_config(model, tmp_path, checkpoint=AUTO, **more), print)
    assert check_checkpoint(again) is None
    check_run_directory(again)
    another = resolve_resume(
        make_config(model, tmp_path, checkpoint=AUTO, optimizer={"learning_rate": 1.0}), print
    )
    with pytest.raises(
        ConfigError, match=r"another configuration \(different: optimizer.learning_rate\)"
    ):
        check_run_directory(another)


def test_keys_that_an_earlier_version_did_not_have_count_with_their_defaults(
    model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path)
    saved = config_tree(config)
    saved["placement"]["gone"] = 1
    del saved["optimizer"]["betas"], saved["telemetry"]["project"], saved["run"]["restarts"]
    assert (
        differences(saved, config) == ["placement.gone"]
        and check_continuation(saved, config, "C") is None
    )
    changed = make_config(model, tmp_path, optimizer={"betas": [0.5, 0.95]})
    assert differences(saved, changed) == ["optimizer.betas", "placement.gone"]


def test_another_learning_rate_is_refused_first_and_the_way_on_is_named(
    model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path, checkpoint=AUTO)
    newest = write(config, 4)
    with own_run_directory(config):
        pass
    changed = resolve_resume(
        make_config(model, tmp_path, checkpoint=AUTO, optimizer={"learning_rate": 1e-3}), print
    )
    with pytest.raises(ConfigError) as refused:
        check_run_directory(changed)
    assert "different: optimizer.learning_rate" in str(refused.value)
    assert f"run.dir=NEW checkpoint.load={newest} goes on" in str(refused.value)


def test_run_says_nothing_of_continuing_before_it_refuses(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(model, tmp_path, checkpoint=AUTO)
    write(config, 4)
    with own_run_directory(config):
        pass
    keys = [
        f"run.dir={config.run.dir}",
        f"model.path={model}",
        "data.train=t",
        "checkpoint.resume=auto",
    ]
    assert main(["run", *keys, "optimizer.learning_rate=1e-3"]) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == ""
        and len(captured.err.splitlines()) == 1
        and "continues" not in captured.err
    )


def finish(config: Config, version: int) -> Path:
    """What a run leaves that has ended with this version."""
    checkpoint = write(config, version)
    exported = Path(config.run.dir) / "hf"
    exported.mkdir(exist_ok=True)
    (exported / "config.json").write_text("{}")
    return checkpoint


def test_a_finished_run_that_is_resumed_says_so_and_starts_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(model, tmp_path, checkpoint=AUTO, schedule={"iterations": 4})
    with own_run_directory(config):
        pass
    checkpoint = finish(config, 4)
    keys = [
        f"run.dir={config.run.dir}",
        f"model.path={model}",
        "data.train=t",
        "checkpoint.resume=auto",
    ]
    assert main(["run", *keys, "schedule.iterations=4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        f"the run in {config.run.dir} is done: its 4 iterations are trained (checkpoint "
        f"{checkpoint})"
    )
    assert "more schedule.iterations continue it" in out and len(out.splitlines()) == 1


@pytest.mark.parametrize(
    "left", ["an iteration", "the export", "an export of now", "the evaluation"]
)
def test_a_run_with_something_left_to_do_is_not_done(
    left: str, model: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "checkpoint": AUTO,
        "schedule": {"iterations": 5 if left == "an iteration" else 4},
    }
    if left == "the evaluation":
        sections["data"] = {"test": "t"}
    config = make_config(model, tmp_path, **sections)
    checkpoint = finish(config, 4)
    exported = Path(config.run.dir) / "hf" / "config.json"
    if left == "the export":
        exported.unlink()
    if left == "an export of now":  # of an earlier end
        long_ago = (checkpoint / store.META_FILE).stat().st_mtime - 100
        os.utime(exported, (long_ago, long_ago))
    assert done_line(resolve_resume(config, print)) is None
    if left == "the evaluation":
        (Path(config.run.dir) / "evaluations.jsonl").write_text(
            json.dumps({"version": 4, "accuracy": 1.0}) + "\n"
        )
        assert done_line(resolve_resume(config, print)) is not None, "a control"


def test_the_same_command_again_says_where_the_old_run_goes(model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path)
    lines: list[str] = []
    with own_run_directory(config, lines.append) as directory:
        (directory / "metrics.jsonl").write_text("{}\n")
    assert lines == [], "a first run has nothing to tell"
    with own_run_directory(config, lines.append):
        pass
    (line,) = lines
    assert line.startswith(
        f"{directory} held a run of this configuration, which moves to "
        f"{directory / 'earlier' / '1'}"
    )
    assert "starts from the beginning" in line and "checkpoint.resume=auto continues" in line
    assert (directory / "earlier" / "1" / "metrics.jsonl").exists()


def test_a_run_that_was_stopped_says_how_to_go_on(model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, schedule={"iterations": 20})
    assert hint_to_continue(config).startswith(
        "no checkpoint was written: the same command starts from the beginning"
    )
    newest = write(config, 4)
    hint = hint_to_continue(config)
    assert (
        hint == f"to go on from {newest} (4 of 20 iterations): the same command with "
        "checkpoint.resume=auto"
    )


@pytest.mark.parametrize(
    "name", ["logs/coordinator.log", "metrics.jsonl", "samples.jsonl", "evaluations.jsonl"]
)
def test_a_directory_where_a_file_belongs_is_refused_before_anything_starts(
    name: str, model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path)
    check_run_directory(config)
    (Path(config.run.dir) / name).mkdir(parents=True)
    with pytest.raises(UserError, match="is no regular file, which the run needs there"):
        check_run_directory(config)
