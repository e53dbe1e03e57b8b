"""The prompt's way that docs/architecture.md lists is the one that a prompt really takes.

One row of a dataset goes through everything from reading it to the optimizer's step: the
coordinator's producer, a stand-in engine behind vLLM's client, reward functions, the buffer's
bytes, the trainers' iterator and the Megatron backend. What runs is watched: a file is on the way
where a function of it is given the prompt or what has become of it.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from pa_npu.algorithm.algorithm import ScoredSamples
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.coordinator.admission import Admitted
from pa_npu.coordinator.engine_groups import producer_on_engines
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.data.prompts import Prompt, load_prompts
from pa_npu.data.records import Record
from pa_npu.dispatch.assignment import GroupWork
from pa_npu.engines.client import EngineClient
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.environments.registry import make_environment
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import Rules
from pa_npu.rewards.functions import (
    RewardInput,
    RewardResult,
    build_function,
    call_function,
    function_specs,
)
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.types import Sample, SampleBuilder
from pa_npu.telemetry.timeline import Timeline
from tests.helpers.backend import learner_of
from tests.helpers.house import PACKAGE
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model
from tools.stand_in import Speed, StandInEngine, serving

# these import megatron, which the helper above has prepared
from pa_npu.algorithm.policy_losses import TokenBatch  # isort: skip
from pa_npu.attention import PrefixLayout  # isort: skip
from pa_npu.backends.megatron.factory import load_stage  # isort: skip

ROWS = (
    Record,
    Prompt,
    Generation,
    Sample,
    SampleBuilder,
    RewardInput,
    RewardResult,
    Group,
    Microbatch,
    PrefixLayout,
    ScoredGroup,
    ScoredSamples,
    Admitted,
    TokenBatch,
)
DATA = (*ROWS, torch.Tensor, np.ndarray)
PRODUCER = "coordinator/producer.py"
QUESTION = "t3 t4 t5 t6 t7"
# Given the data to hand it on as it is, or to compute what the file before them asks for: no step
# of its own.
HANDS_ON = {
    "control/worker_process.py": "the pipe to a worker",
    "control/channel.py": "bytes into the store",
    "platform/ops.py": "norm and rotation on this platform",
    "algorithm/choices.py": "which teachers a microbatch asks, of which it has none here",
    "algorithm/model_outputs.py": "joins targets and outputs for the losses",
    "attention/layout.py": "what a layout knows of itself",
    "attention/plans.py": "which kernel calls a form makes of a layout",
    "attention/rows.py": "which rows a form gathers",
    "backends/in_step.py": "the turns of a rank, and the loss of a microbatch, or of a filler, which is zero",
    "rewards/decimal_commas.py": "whether points separate thousands in the response's language",
    "samples/wire_rows.py": "which tokens the wire leaves out",
    "samples/notice.py": "whether a payload is a group or the notice of one without a gradient",
}
# Looks at it, and nothing goes on from there.
ASIDE = {
    "algorithm/adamw.py": "the step calculated again",
    "algorithm/agreement_sums.py": "statistics of log-prob differences",
    "attention/kept.py": "what is kept for the rows of a packed sequence",
    "algorithm/gradient_formulas.py": "the loss's gradient calculated again",
    "algorithm/loss_gradient.py": "what the loss was given, and the gradient that came back",
    "backends/protocol.py": "refuses attachments that the model does not take",
    "coordinator/answers.py": "what engines answered, to compare samples with",
    "samples/group_digest.py": "digests for the chain",
    "trainer/loss_checks.py": "compares gradients",
    "trainer/missing_gradients.py": "which tensors a gradient has come to",
    "trainer/step_elements.py": "the elements by which a step is judged",
    "trainer/step_replay.py": "compares steps",
    "engines/protocol.py": "definitions",
}
# Given tensors, none of which has a row or a token of its own any more.
NOTHING_OF_IT = {
    "algorithm/update_sums.py": "sums of an update",
    "backends/megatron/optimizer.py": "parameters",
    "trainer/learner.py": "sums over ranks",
}
NOT_STEPS = (
    "backends/megatron/patches/",
    "planning/",
    "telemetry/",
    "data/time_limit.py",
    "config/",
    "publish/",
)


def documented() -> list[str]:
    """The files of the table in docs/architecture.md, in its order, each as often as it stands
    there.
    """
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    table = text.partition("## A prompt's way")[2].partition("\n## ")[0]
    files: list[str] = []
    for row in re.findall(r"^\| [^|]+ \| (`[^|]+) \|", table, re.MULTILINE):
        for name in re.findall(r"`([\w/]+\.py)`", row):
            files.append(name if "/" in name else f"{files[-1].rpartition('/')[0]}/{name}")
    return files


def is_data(value: Any, depth: int = 0) -> bool:
    if isinstance(value, DATA):
        return True
    if isinstance(value, str):
        return QUESTION in value
    if isinstance(value, (bytes, bytearray)):
        return len(value) > 100
    if isinstance(value, dict):
        return depth < 2 and any(is_data(item, depth + 1) for item in value.values())
    if not isinstance(value, (list, tuple)):
        return False
    numbers = len(value) > 4 and all(type(item) in (int, float) for item in value)
    return numbers or (depth < 2 and any(is_data(item, depth + 1) for item in value))


@contextmanager
def watched() -> Iterator[list[str]]:
    """Watches every function of the package; yields the files in the order in which they were first
    given a prompt's data.
    """
    files: list[str] = []
    prefix = f"{PACKAGE}/"

    def on_call(frame: Any, _event: str, _argument: Any) -> None:
        code = frame.f_code
        file = code.co_filename.removeprefix(prefix)
        if file == code.co_filename or file in files:
            return
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(is_data(frame.f_locals.get(name)) for name in parameters):
            files.append(file)

    threading.settrace(on_call)
    sys.settrace(on_call)
    try:
        yield files
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def make_config(directory: Path) -> Config:
    model = make_model(directory / "model")
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(128)}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="t1", pad_token="t0"
    ).save_pretrained(model)
    train = directory / "train.jsonl"
    train.write_text(json.dumps({"question": QUESTION, "answer": "5"}) + "\n")
    return model_config(
        model,
        run={"dir": str(directory / "run")},
        data={"train": str(train)},
        rollout={"responses_per_prompt": 4, "max_response_tokens": 8, "window": 64},
        # equal rewards would otherwise end the way before the models
        schedule={"prompts_per_iteration": 1, "skip_zero_advantage": False},
        microbatch={"responses": 4},
        publish={"noise_margin": None},
        reward={"functions": [{"name": "math"}]},
    )


async def produce(config: Config, spec: ModelSpec, tokenizer: Any, buffer: RolloutBuffer) -> None:
    """The coordinator's half: from a row to bytes in the buffer."""
    engine = StandInEngine(Speed(), vocab_size=spec.vocab_size)
    async with (
        RewardPool(config.reward) as rewards,
        serving(engine) as url,
        EnginePool([EngineClient(url, spec.vocab_size)]) as pool,
    ):
        await pool.engines[0].load_weights(0, deadline_s=30)
        with ThreadPoolExecutor(1) as store_thread:
            work = GroupWork(spec, config)
            producer = producer_on_engines(
                config=config,
                pool=pool,
                environment=make_environment(config, tokenizer),
                rewards=rewards,
                buffer=buffer,
                controller=ScheduleController(Rules.from_config(config), work),
                sampling=Sampling(8, 1.0),
                timeline=Timeline(None, ""),
                work=work,
                store_thread=store_thread,
            )
            read = load_prompts(config.data.datasets[0], tokenizer, config.data, "data.train")
            await producer.produce(0, list(read.prompts))


def reward_worker(config: Config) -> None:
    """Does the work of the pool's worker here, which does it unseen in a process of its own."""
    from pa_npu.rewards.worker import compute

    functions = [(spec, build_function(spec)) for spec in function_specs(config.reward)]
    compute(functions, RewardInput(QUESTION, "5", [f"{QUESTION} #### 5"], [9], {}), lambda _: None)
    assert call_function(functions[0][1], RewardInput(QUESTION, "5", ["#### 5"], [3], {})) == (
        [1.0],
        None,
    )


def test_a_prompt_takes_the_way_that_is_documented(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    spec = ModelSpec.read(config.model.path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(config.model.path)
    with single_process(config):
        stage = load_stage(config, spec, PLATFORM)
        learner = learner_of(stage, config, spec)
        buffer = RolloutBuffer(StoreChannel(dist.HashStore()), "run", readers=1)
        with watched() as files:
            asyncio.run(produce(config, spec, tokenizer, buffer))
            reward_worker(config)
            source = MicrobatchIterator(
                buffer,
                **{"replica": 0, "num_replicas": 1, "iteration": 0, "groups": 1, "order": "prompt"},
                **{
                    "responses_per_microbatch": 4,
                    "shared_prompt": True,
                    "pad_multiple": 1,
                    "timeout_s": 5.0,
                },
            )
            learner.accumulate(source)
            source.finish()
            update = learner.step()
    assert np.isfinite(update.report.grad_norm), "the prompt came through"

    way = documented()
    taken = {file for file in files if not file.startswith(NOT_STEPS)}
    unknown = taken - {*way, *HANDS_ON, *ASIDE, *NOTHING_OF_IT}
    assert not unknown, (
        f"{sorted(unknown)}: put it into docs/architecture.md, or say here what it is"
    )
    unused = set(way) - taken
    assert not unused, (
        f"{sorted(unused)}: no prompt comes there; take it out of docs/architecture.md"
    )
    assert not {*HANDS_ON, *ASIDE} - taken, (
        f"{sorted({*HANDS_ON, *ASIDE} - taken)}: nothing comes there"
    )
