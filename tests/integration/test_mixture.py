"""A mixture of experts in real engines and in whole runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.control.tasks import gather
from pa_npu.engines.protocol import Sampling
from pa_npu.samples.expert_choices import ExpertChoices
from tests.helpers.engine_process import KEY, EngineProcess
from tests.helpers.engine_subjects import MAX_RESPONSE, VOCAB, make_engine_model
from tests.helpers.launched import random_tiny
from tests.helpers.megatron import model_config
from tests.helpers.models import make_model
from tests.helpers.rank_processes import ROOT
from tools import make_tiny_model

pytestmark = pytest.mark.integration
REPAIR = "kernel.process_weights_after_loading(experts)"


def test_vllm_computes_new_experts_after_a_reload_only_because_they_are_packed_again(
    tmp_path: Path,
) -> None:
    models = [
        make_model(tmp_path / name, "qwen3_moe", seed=seed, hidden=128)
        for seed, name in enumerate("ab")
    ]
    command = [
        sys.executable,
        "-m",
        "tests.helpers.vllm_mixture",
        *map(str, models),
        str(tmp_path / "out.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    actual = json.loads((tmp_path / "out.json").read_text())
    assert actual["loaded"] < 1e-5 and actual["with it"] < 1e-5, actual
    assert (
        "no weights for 2 parameter(s) of the engine, the first is 'model.layers.1.mlp.experts"
        in actual["missing"]
    )
    assert actual["without the repair"] > 0.1, f"the reload has become right by itself: {actual}"
    assert actual["live"] == [[], []], (
        "an honest load leaves all that was sent in memory, and every tensor has a place"
    )
    wrong, unplaced = actual["scaled"]
    assert not unplaced and len(wrong) == 3, "one norm, and the stacked experts of two layers"
    assert [name for name in wrong if "experts" not in name] == [
        "model.layers.0.input_layernorm.weight"
    ]


async def test_vllms_expert_choices_are_transformers_ones_if_cached_preempted_or_moved_too(
    tmp_path: Path,
) -> None:
    """Groups whose prompts begin alike, in a KV cache that holds a third of them; control: requests
    were preempted.
    """
    model = make_engine_model(tmp_path / "model", family="qwen3_moe", layers=3, mlp_only_layers=[1])
    expert_choices = ExpertChoices.from_config(
        model_config(model, algorithm={"router_replay": "rollout"})
    )
    assert expert_choices is not None
    small = {"max_num_seqs": 16, "kv_cache_gib": 0.0012, "statistics": True}
    engine = EngineProcess("vllm", model, tmp_path, small)
    generator = torch.Generator().manual_seed(1)
    common, *rest = torch.randint(2, VOCAB, (5, 32), generator=generator).numpy().astype(np.int32)
    prompts = [np.concatenate([common, own[: 5 + 7 * number]]) for number, own in enumerate(rest)]
    sampling = Sampling(
        max_tokens=MAX_RESPONSE, temperature=1.0, ignore_eos=True, expert_choices=expert_choices
    )
    try:
        await engine.wait_ready()
        async with engine.client() as client:
            assert (await client.wait_ready(deadline_s=60.0)).records_expert_choices
            several = [
                client.generate(prompt, 4, 100 * i, sampling, deadline_s=400.0)
                for i, prompt in enumerate(prompts)
            ]
            groups = await gather(several)
            first = groups[1][0]
            left, begun = replace(sampling, max_tokens=MAX_RESPONSE - 20), first.tokens[:20]
            (moved,) = await client.generate(
                prompts[1], 1, 100, left, deadline_s=400.0, written=begun
            )
            output, _ = await client._request("GET", "/metrics", None, 60.0, max_bytes=2**24)
    finally:
        engine.kill()
    preemptions = re.findall(
        r"^vllm:num_preemptions_total\S* ([0-9.e+]+)$", output.decode(), re.MULTILINE
    )
    assert sum(map(float, preemptions)) > 0, (
        "nothing was preempted: the test could not see its expert choices"
    )
    hf_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    checked = [
        (prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group
    ]
    for prompt, one in [*checked, (np.concatenate([prompts[1], begun]), moved)]:
        tokens = torch.from_numpy(np.concatenate([prompt, one.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = hf_model(tokens, output_router_logits=True).router_logits
        wanted = torch.stack([layer.topk(2, -1).indices for layer in logits], 1).sort(-1).values
        actual = (
            torch.from_numpy(one.columns[expert_choices.column].astype(np.int64)).sort(-1).values
        )
        assert torch.equal(actual[:-1], wanted[:-1]), (
            f"{(actual != wanted)[:-1].sum()} choices differ"
        )
        last = actual[-1]
        assert (last == expert_choices.column.elsewhere).all() or torch.equal(last, wanted[-1])


def quick_start(
    tiny: Path, directory: Path, *keys: str, root: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """The quick start's run of a model, with the package in `root`."""
    command = [
        sys.executable,
        "-m",
        "pa_npu.launcher",
        "run",
        "--config",
        str(ROOT / "configs" / "grpo_tiny.yaml"),
    ]
    command += [
        f"run.dir={directory}",
        f"model.path={tiny}/model",
        f"data.train={tiny}/train.jsonl",
    ]
    command += [
        f"data.test={tiny}/test.jsonl",
        f"rollout.python={sys.executable}",
        "telemetry.trackers=[]",
        *keys,
    ]
    environment = {**os.environ, **KEY, "PYTHONPATH": str(root)}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=1500
    )


def lines(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_tiny_mixture_learns_the_quick_starts_sums(tmp_path: Path) -> None:
    tiny = tmp_path / "tiny"
    assert make_tiny_model.main(["--out", str(tiny), "--family", "qwen3_moe"]) == 0
    done = quick_start(tiny, tmp_path / "run", "schedule.iterations=12")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records, evaluations = (
        lines(tmp_path / "run/metrics.jsonl"),
        lines(tmp_path / "run/evaluations.jsonl"),
    )
    assert evaluations[-1]["accuracy"] > evaluations[0]["accuracy"] + 0.3, evaluations
    for record in records:
        assert record["logprob_diff_mean"] < 2e-6 and record["logprob_diff_max"] < 1e-4, record
        assert (
            record["experts_untouched"] == 0
            and 1 <= record["expert_imbalance"] <= record["expert_imbalance_max"]
        )


@pytest.mark.nightly  # choices that are replayed: test_mixture_trainer.py; those of vLLM: above
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.timeout(1800)
def test_a_run_with_router_replay_loses_no_route_and_changes_no_choice(
    engine: str, tiny_mixture: Path, shared_engine: Callable[[Path], str], tmp_path: Path
) -> None:
    """In fp32 on a CPU both sides choose alike; the probe, which is not replayed, says so too."""
    keys = (
        "algorithm.router_replay=rollout",
        "schedule.iterations=2",
        "schedule.prompts_per_iteration=4",
        # a random model earns nothing, and what has no gradient would not be computed
        "schedule.skip_zero_advantage=false",
    )
    keys += ("data.test=null", f"rollout.backend={engine}", "rollout.max_response_tokens=12")
    if engine == "transformers":
        keys += (f"rollout.attach={shared_engine(tiny_mixture / 'model')}",)
    done = quick_start(tiny_mixture, tmp_path / "run", *keys)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for record in lines(tmp_path / "run/metrics.jsonl"):
        assert record["expert_choices_missing"] == 0 and record["replay_changed"] < 1e-3, record
        assert record["logprob_diff_max"] < 1e-4 and record["probe_diff_max"] < 1e-4, record


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_whose_experts_are_not_packed_again_is_stopped(tmp_path: Path) -> None:
    tiny, root = random_tiny(tmp_path, "--family", "qwen3_moe"), tmp_path / "changed"
    shutil.copytree(ROOT / "pa_npu", root / "pa_npu")
    file = root / "pa_npu" / "engines" / "vllm" / "experts.py"
    text = file.read_text()
    assert text.count(REPAIR) == 1
    file.write_text(text.replace(REPAIR, "pass"))
    keys = ("schedule.iterations=2", "schedule.prompts_per_iteration=8", "data.test=null")
    done = quick_start(tiny, tmp_path / "run", *keys, root=root)
    assert done.returncode != 0 and "I5 agreement" in done.stdout + done.stderr, done.stdout[-3000:]
