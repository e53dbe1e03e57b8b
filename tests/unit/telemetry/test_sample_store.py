"""Kept samples: what is read back is what was written, whatever it holds, and no file costs the run more than its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest
import torch

from pa_npu.errors import DataError
from pa_npu.samples.attachments import Attachment, Placeholders, described
from pa_npu.telemetry.records import lost_records
from pa_npu.telemetry.sample_store import (
    SampleStore,
    TrainerLogprobs,
    kept_groups,
    read_samples,
    sample_iterations,
)
from tests.helpers.finished_run import (
    GROUPS,
    HOSTILE,
    RESPONSES,
    kept_responses,
    piece,
    write_samples,
)


def test_responses_come_back_as_they_were_with_the_trainers_logprobs_of_the_same_tokens(
    tmp_path: Path,
) -> None:
    write_samples(tmp_path, 2)
    assert sample_iterations(tmp_path) == [0, 1]
    rows = read_samples(tmp_path, 1)
    written = kept_responses(1)
    assert [(row["index"], row["response"]) for row in rows] == [
        (r.index, r.response) for r in written
    ]
    for row, kept in zip(rows, written, strict=True):
        for name in (
            "prompt",
            "text",
            "answer",
            "tokens",
            "finish_reason",
            "version",
            "correct",
            "errors",
        ):
            wanted = getattr(kept, name)
            assert row[name] == (list(wanted) if isinstance(wanted, tuple) else wanted), name
        assert row["rewards"] == pytest.approx(kept.rewards) and row["advantage"] == pytest.approx(
            kept.advantage
        )
        assert row["logprobs"] == kept.logprobs, "float32 both ways"
        assert row["pieces"] == [
            piece(token).encode("utf-8", "replace").decode() for token in kept.tokens
        ]
        if kept.index < 4:
            difference = torch.tensor(row["trainer_logprobs"]) - torch.tensor(kept.logprobs)
            assert difference[0].item() == pytest.approx(-1e-3, abs=1e-6)
            assert difference[-1].item() == pytest.approx(2e-3, abs=1e-6)
        else:
            assert row["trainer_logprobs"] is None, "of four groups only"
    assert rows[0]["text"] == HOSTILE


def test_all_iterations_are_one_data_set_for_readers_of_parquet(tmp_path: Path) -> None:
    write_samples(tmp_path, 3)
    table = pyarrow.dataset.dataset(tmp_path / "samples", format="parquet").to_table()
    assert table.num_rows == 3 * GROUPS * RESPONSES
    assert {"prompt", "text", "reward", "rewards", "advantage", "logprobs", "tokens"} <= set(
        table.column_names
    )


def test_a_run_that_goes_on_from_a_checkpoint_drops_what_an_earlier_attempt_kept_after_it(
    tmp_path: Path,
) -> None:
    write_samples(tmp_path, 3)
    SampleStore(tmp_path, 1, piece).close()
    assert sample_iterations(tmp_path) == [0]
    assert [path.name for path in (tmp_path / "samples_trainer").iterdir()] == [
        "iteration_000000.rank0.parquet"
    ]


def test_what_cannot_be_written_is_counted_and_nothing_is_raised(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file where the directory would be")
    (tmp_path / "samples_trainer").write_text("the same")
    before = lost_records()
    store = SampleStore(tmp_path, 0, piece)
    store.write(0, kept_responses(0))
    store.close()
    trainer = TrainerLogprobs(tmp_path, 0, 4)
    trainer.add(0, [(0, 0)], [2], torch.zeros(2))
    trainer.write()
    trainer.close()
    assert lost_records() == before + 2


def test_a_file_that_is_broken_is_one_error_that_names_it(tmp_path: Path) -> None:
    write_samples(tmp_path, 1)
    (tmp_path / "samples" / "iteration_000000.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"iteration_000000\.parquet: cannot be read"):
        read_samples(tmp_path, 0)


def test_trainers_keep_the_groups_that_the_coordinator_keeps_and_begin_anew_with_an_iteration(
    tmp_path: Path,
) -> None:
    trainer = TrainerLogprobs(tmp_path, 3, kept_groups(1))
    trainer.add(0, [(0, 0), (1, 0), (0, 1)], [2, 1, 1], torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    trainer.write()
    trainer.add(0, [(0, 2)], [1], torch.tensor([-5.0]))  # of the iteration's next update
    trainer.write()
    trainer.add(1, [(0, 0)], [1], torch.tensor([-6.0]))
    trainer.write()
    trainer.close()
    files = sorted((tmp_path / "samples_trainer").iterdir())
    assert [file.name for file in files] == [
        f"iteration_00000{number}.rank3.parquet" for number in range(2)
    ]
    first, second = (pyarrow.dataset.dataset(file).to_table().to_pylist() for file in files)
    assert first == [
        {"index": 0, "response": 0, "logprobs": [-1.0, -2.0]},
        {"index": 0, "response": 1, "logprobs": [-4.0]},
        {"index": 0, "response": 2, "logprobs": [-5.0]},
    ]
    assert second == [{"index": 0, "response": 0, "logprobs": [-6.0]}]
    assert kept_groups("all") > 10**9 and kept_groups(0) == 0


def test_groups_that_agents_and_reward_functions_reward_are_kept_together(tmp_path: Path) -> None:
    by_functions = kept_responses(0)[0]
    by_agents = replace(kept_responses(0)[4], rewards={"environment": 0.5})
    store = SampleStore(tmp_path, 0, piece)
    store.write(0, [by_agents, by_functions])
    store.close()
    assert [row["rewards"] for row in read_samples(tmp_path, 0)] == [
        pytest.approx(by_functions.rewards),
        {"environment": 0.5},
    ]


def test_of_attachments_a_sample_keeps_what_they_are_and_no_values(tmp_path: Path) -> None:
    pixels = Attachment("pixels", np.ones((64, 1176), np.float32))
    grid = Attachment("grid", np.array([[1, 8, 8]], np.int64))
    described_run = described([Placeholders(3, 16, (pixels, grid))])
    attached, plain = (replace(row) for row in kept_responses(0)[:2])
    attached = replace(attached, attachments=described_run)
    store = SampleStore(tmp_path, 0, piece)
    store.write(0, [attached, plain])
    store.close()
    rows = read_samples(tmp_path, 0)
    assert [row["attachments"] for row in rows] == [described_run, []]
    (file,) = (tmp_path / "samples").iterdir()
    assert pixels.array.tobytes()[:64] not in file.read_bytes()
