"""Run.stop() on real runs: the iteration is finished, a checkpoint and an export are left, and the run goes on to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from pa_npu import Run
from pa_npu.checkpoints import directories
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.errors import UserError
from pa_npu.launcher.cli import main
from pa_npu.telemetry.chain import read_chain
from tests.helpers.launched import settings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

ITERATIONS = 8
STOPPED_IN = 1
TIMEOUT_S = 900.0
KEYS: dict[str, object] = {
    "schedule.iterations": ITERATIONS,
    "schedule.order": "prompt",
    "reward.functions": "[{name: 'examples.verify_a_run:brevity'}]",
    "data.test": "null",
    "optimizer.learning_rate": "1e-3",
    "telemetry.trackers": "[]",
    "checkpoint.export_hf": "true",
    "rollout.window": 8,
}
MODES: dict[str, dict[str, object]] = {
    "blocking": {},
    "one version behind": {"schedule.max_staleness": 1},
    "delayed": {"schedule.max_staleness": 1, "publish.mode": "delayed"},
    "rolling": {"schedule.max_staleness": 1, "publish.mode": "rolling", "rollout.engines": 3},
    "fsdp, adapters": {"trainer.backend": "fsdp", "lora.rank": 4},
}


def configuration(tiny: Path, run_dir: Path, mode: str, **others: object) -> Config:
    return load_config([], settings(tiny, run_dir, **KEYS | MODES[mode], **others))


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_stopped_leaves_a_checkpoint_and_an_export_and_goes_on_to_the_same_bits(
    tiny: Path, tmp_path: Path, mode: str
) -> None:
    lines: list[str] = []
    config = configuration(tiny, tmp_path / "run", mode)
    with Run(config, on_line=lines.append) as run:
        for record in run:
            if record["iteration"] == STOPPED_IN:
                run.stop()
                break
    output = "\n".join(lines)
    done = len(run.records)
    assert STOPPED_IN < done < ITERATIONS, (
        f"the iteration that it was in is finished, and no other\n{output}"
    )
    newest = directories.complete(run.dir / directories.CHECKPOINTS)[-1]
    assert directories.version_of(newest) == done and directories.problem(newest) is None, output
    assert main(["verify", str(run.dir)]) == 0
    if config.lora.rank:
        assert (run.hf / "adapter_config.json").is_file()
    else:
        AutoModelForCausalLM.from_pretrained(run.hf)

    with Run(
        configuration(tiny, tmp_path / "run", mode, checkpoint__resume="auto"), on_line=lines.append
    ) as continued:
        continued.wait(TIMEOUT_S)
    with Run(configuration(tiny, tmp_path / "calm", mode), on_line=lines.append) as calm:
        calm.wait(TIMEOUT_S)
    assert [link.iteration for link in read_chain(run.dir)] == list(range(ITERATIONS))
    assert main(["diff", str(run.dir), str(calm.dir)]) == 0


@pytest.mark.nightly
def test_a_run_that_is_stopped_before_it_trains_is_no_failure_and_says_that_there_are_no_weights(
    tiny: Path, tmp_path: Path
) -> None:
    with Run(configuration(tiny, tmp_path / "run", "blocking"), on_line=None) as run:
        run.stop()
    assert not run.is_running and run.records == []
    run.stop()
    with pytest.raises(
        UserError, match="is not there; a run writes it when it is done or ended by stop"
    ):
        _ = run.hf
