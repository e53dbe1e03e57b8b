"""Invariant I4: with order=prompt, a periodic run ends with the synchronous run's weights bit for bit, whatever its schedules are.

Real engines and trainers; schedules differ in order, windows and turns from iteration to iteration,
and roles change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pa_npu.families.model_directory import load_tokenizer
from tests.helpers.engine_process import KEY
from tests.helpers.launched import Launched, settings
from tests.helpers.remote_model import make_remote
from tests.helpers.scripted_schedules import NAMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

TIMEOUT_S = 300.0
GROUPS, ITERATIONS = 8, len(NAMES)


@pytest.fixture(scope="module")
def launched() -> Iterator[list[Launched]]:
    """The runs that `run` has made, the newest last."""
    made: list[Launched] = []
    yield made
    for item in made:
        item.close()


@pytest.fixture(scope="module")
def run(
    tiny: Path, launched: list[Launched], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[dict[str, torch.Tensor], Any]]:
    """Runs with some keys of their own; gives (final weights, records)."""

    def start(**others: object) -> tuple[dict[str, torch.Tensor], Any]:
        directory = tmp_path_factory.mktemp("scheduled")
        chosen: dict[str, object] = {
            "schedule.iterations": ITERATIONS,
            "schedule.prompts_per_iteration": GROUPS,
            "schedule.order": "prompt",
            "rollout.responses_per_prompt": 4,
            "rollout.max_response_tokens": 16,
            "reward.functions": '[{name: format, pattern: "[0-4]"}]',
            "data.test": "null",
            "trainer.devices": 2,
            "optimizer.learning_rate": "1e-3",
            "telemetry.trackers": "[]",
        }
        arguments = settings(tiny, directory / "run", **(chosen | others))
        launched.append(Launched(directory, "run", *arguments, variables=KEY))
        launched[-1].popen.wait(TIMEOUT_S)
        assert launched[-1].popen.returncode == 0, launched[-1].output
        records = [
            json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()
        ]
        return load_file(directory / "run/hf/model.safetensors"), records

    return start


@pytest.fixture(scope="module")
def synchronous(
    run: Callable[..., Any], tiny: Path, shared_engine: Callable[[Path], str]
) -> Callable[[str], Any]:
    """Gives the synchronous run of a trainer.backend, which is made once."""
    attach = shared_engine(tiny / "model")
    return cache(
        lambda backend: run(
            **{"schedule.stream": "false", "trainer.backend": backend, "rollout.attach": attach}
        )
    )


@pytest.mark.nightly  # models with code of their own: unit/attention/test_any_model.py
def test_sharded_trainers_of_a_model_with_code_of_its_own_end_with_the_synchronous_runs_weights_too(
    run: Callable[..., Any], launched: list[Launched], tiny: Path, tmp_path: Path
) -> None:
    """Once it is trusted, its model, configuration and tokenizer are in every process of a run, and
    in the export.
    """
    model = make_remote(tmp_path / "model", tiny)
    chosen = {
        "trainer.backend": "fsdp",
        "model.trust_remote_code": "true",
        "model.path": model,
        "schedule.iterations": 3,
    }
    weights, records = run(**chosen)
    exported = launched[-1].output_file.parent / "run" / "hf"
    assert "model.path: transformers own, prompts are shared" in launched[-1].output
    synchronous, _ = run(**chosen, **{"schedule.stream": "false"})
    assert weights.keys() == synchronous.keys() and all(
        torch.equal(weights[n], synchronous[n]) for n in weights
    )
    assert any(
        not torch.equal(tensor, weights[name])
        for name, tensor in load_file(model / "model.safetensors").items()
    )
    assert len(records) == 3 and all(record["logprob_diff_max"] < 1e-5 for record in records), (
        records
    )
    assert type(load_tokenizer(str(exported), True)).__name__ == "OwnTokenizer"
    own, ids = (
        AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True),
        torch.arange(12)[None],
    )
    assert type(own).__name__ == "OwnForCausalLM"
    plain = LlamaForCausalLM(LlamaConfig.from_pretrained(exported))
    plain.load_state_dict(own.state_dict())
    torch.testing.assert_close(
        own(ids).logits, 2 * plain.eval()(ids).logits, msg="its code computes"
    )


@pytest.mark.nightly  # a mixture on several ranks: test_mixture_trainer.py
def test_replicas_that_share_a_mixtures_experts_end_with_the_synchronous_runs_weights_too(
    run: Callable[..., Any],
    tiny_mixture: Path,
    shared_engine: Callable[[Path], str],
    tmp_path: Path,
) -> None:
    """Their groups are sessions of three to seven samples, so that one of them computes fillers
    beside the other's last microbatches."""
    log = tmp_path / "sessions"
    mixture = {
        "model.path": tiny_mixture / "model",
        "rollout.attach": shared_engine(tiny_mixture / "model"),
        "trainer.expert_parallel": 2,
        "environment.name": "tests.helpers.sessions:Sessions",
        "environment.options": f"{{log: {log}}}",
        "microbatch.responses": 2,
        "schedule.iterations": 3,
    }
    weights, records = run(**mixture)
    assert_sessions(log, records)
    synchronous, held = run(**mixture, **{"schedule.stream": "false"})
    assert any(record["microbatches"] % 2 for record in records), (
        "as many on both: the test could not see a filler"
    )
    assert [record["loss"] for record in records] == [record["loss"] for record in held]
    assert weights.keys() == synchronous.keys() and all(
        torch.equal(weights[n], synchronous[n]) for n in weights
    )
    initial = load_file(tiny_mixture / "model" / "model.safetensors")
    same = [name for name in weights if torch.equal(weights[name], initial[name])]
    assert not same, f"not trained: {same}"


@pytest.mark.parametrize(
    "engines",
    [
        pytest.param({"rollout.engines": 2, "placement.colocate": "true"}, id="roles"),
        pytest.param({"rollout.engines": 2}, id="two engines", marks=pytest.mark.nightly),
        pytest.param(
            {"rollout.engines": 2, "placement.colocate": "true", "trainer.backend": "fsdp"},
            id="roles of sharded trainers",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_whatever_the_schedules_weights_are_those_of_the_synchronous_run(
    engines: dict[str, object], run: Callable[..., Any], synchronous: Callable[[str], Any]
) -> None:
    weights, records = run(
        **{"environment.name": "tests.helpers.scripted_schedules:Scripted"}, **engines
    )
    assert [record["schedule"] for record in records] == list(NAMES), "the schedules were followed"
    if "placement.colocate" in engines:
        assert [record["role_changes"] for record in records] == [0, 1, 1, 1, 1, 1], (
            "the first teaches how fast engines are"
        )
    expected, held = synchronous(str(engines.get("trainer.backend", "megatron")))
    assert [(r["reward_mean"], r["loss"]) for r in records] == [
        (r["reward_mean"], r["loss"]) for r in held
    ]
    assert weights.keys() == expected.keys()
    different = [
        name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)
    ]
    assert not different, f"tensors that differ: {different}"
    assert len({r["loss"] for r in held}) > 1, "negative control: there is something to learn"


@pytest.mark.nightly  # context groups: test_context_parallel.py
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_ranks_that_share_every_sequence_end_with_the_synchronous_runs_weights_too(
    backend: str,
    run: Callable[..., Any],
    tiny: Path,
    shared_engine: Callable[[Path], str],
) -> None:
    """Two ranks of one replica, whose counts are checked by replica, with the finite difference of
    their gradient and the agreement of engine and trainer.
    """
    context = {
        "trainer.backend": backend,
        "trainer.context_parallel": 2,
        "rollout.attach": shared_engine(tiny / "model"),
        "schedule.iterations": 3,
        "schedule.finite_difference_every": 2,
    }
    weights, records = run(**context)
    synchronous, held = run(**context, **{"schedule.stream": "false"})
    for key in ("reward_mean", "loss", "grad_norm"):
        assert [record[key] for record in records] == [record[key] for record in held], key
    assert weights.keys() == synchronous.keys()
    different = [name for name in synchronous if not torch.equal(weights[name], synchronous[name])]
    assert not different, f"tensors that differ: {different}"
    assert all(record["logprob_diff_max"] < 1e-4 for record in records)
    initial = load_file(tiny / "model" / "model.safetensors")
    assert any(not torch.equal(weights[name], initial[name]) for name in weights)


def assert_sessions(log: Path, records: list[dict[str, Any]]) -> None:
    """The run opened its environment, got groups of the sizes that it chose, and closed it."""
    noted = log.read_text().split()
    first = noted.index("close") + 1  # before that it was tried
    assert (noted[0], noted[first], noted[-1]) == ("open", "open", "close")
    sizes = noted[first + 1 : -1]
    assert len(sizes) == len(records) * GROUPS and {"3", "7"} <= set(sizes) <= set("34567"), sizes
    assert [record["groups"] for record in records] == [GROUPS] * len(records)


@pytest.mark.nightly  # those of a mixture are above
def test_sessions_of_three_to_seven_samples_are_trained_and_periodic_equals_synchronous(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    """Two replicas, whose groups differ in size, in microbatches of up to two samples."""
    log = tmp_path / "sessions"
    own = {
        "environment.name": "tests.helpers.sessions:Sessions",
        "environment.options": f"{{log: {log}}}",
        "schedule.iterations": 2,
        "microbatch.responses": 2,
    }
    weights, records = run(**own)
    assert_sessions(log, records)
    wanted, _ = run(**own, **{"schedule.stream": "false"})
    changed = [name for name in wanted if not torch.equal(weights[name], wanted[name])]
    assert not changed, f"tensors that differ: {changed}"
