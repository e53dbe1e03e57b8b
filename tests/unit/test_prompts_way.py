"""The prompt's way that docs/architecture.md lists is the one that a prompt really takes, and it stays short.

One row of a dataset goes through everything from reading it to the optimizer's step: the coordinator's producer, a stand-in engine
behind vLLM's client, reward functions, the buffer's bytes, the trainers' iterator and the Megatron backend. What runs is watched:
a file is on the way where a function of it is given the prompt or what has become of it.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.coordinator.admission import Admitted
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.producer import Producer
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
from pa_npu.rewards.functions import RewardInput, RewardResult, build_function, call_function, function_specs
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
    *(Record, Prompt, Generation, Sample, SampleBuilder, RewardInput, RewardResult, Group, Microbatch, PrefixLayout),
    *(ScoredGroup, Admitted, TokenBatch),
)
DATA = (*ROWS, torch.Tensor, np.ndarray)
MOST_LINES = 50  # of Producer.produce
PRODUCER = "coordinator/producer.py"
QUESTION = "t3 t4 t5 t6 t7"
MOST_FILES, MOST_WITH_HANDS, MOST_THAT_CARRY, MOST_RETURNS = 32, 36, 40, 9
# Given the data to hand it on as it is, or to compute what the file before them asks for: no step of its own.
HANDS_ON = {
    "control/worker_process.py": "the pipe to a worker",
    "control/channel.py": "bytes into the store",
    "platform/ops.py": "norm and rotation on this platform",
    "attention/layout.py": "what a layout knows of itself, and which rows a form gathers",
}
# Looks at it, and nothing goes on from there.
ASIDE = {
    "algorithm/agreement.py": "statistics of log-prob differences",
    "engines/protocol.py": "definitions",
}
# Holds tensors, none of which has a row or a token of its own any more.
NOTHING_OF_IT = {
    "algorithm/update_sums.py": "sums of an update",
    "backends/megatron/optimizer.py": "parameters",
    "trainer/learner.py": "sums over ranks",
}
NOT_STEPS = ("backends/megatron/patches/", "planning/", "telemetry/", "data/time_limit.py", "config/", "publish/")


def documented() -> list[str]:
    """The files of the table in docs/architecture.md, in its order, each as often as it stands there."""
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


@dataclass
class Seen:
    """The way of a prompt, as it was seen.

    given: files of the package in the order in which a function of theirs was first given data. carry: those where a function
    held it in any variable. rows: of NOTHING_OF_IT, those where it was more than a bare array. returns: places of the producer that
    give it to another file, from where the reader comes back.
    """

    given: list[str] = field(default_factory=list)
    carry: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    returns: set[tuple[int, str]] = field(default_factory=set)


@contextmanager
def watched() -> Iterator[Seen]:
    """Watch every function of the package."""
    seen = Seen()
    prefix = f"{PACKAGE}/"

    def see(frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        file = code.co_filename.removeprefix(prefix)
        if file == code.co_filename:
            return None
        if event == "return":
            if file in NOTHING_OF_IT and any(isinstance(value, ROWS) for value in frame.f_locals.values()):
                seen.rows.add(file)
            if file not in seen.carry and any(is_data(value) for value in frame.f_locals.values()):
                seen.carry.add(file)
            return None
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        caller = frame.f_back
        is_next = caller is not None and caller.f_code.co_filename == f"{prefix}{PRODUCER}" and file != PRODUCER
        if (file not in seen.given or is_next) and any(is_data(frame.f_locals.get(name)) for name in names):
            if file not in seen.given:
                seen.given.append(file)
            if is_next:
                seen.returns.add((caller.f_lineno, code.co_name))
        if file in seen.carry - NOTHING_OF_IT.keys():
            return None
        frame.f_trace_lines = False
        return see

    threading.settrace(see)
    sys.settrace(see)
    try:
        yield seen
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def make_config(directory: Path) -> Config:
    model = make_model(directory / "model")
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(128)}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", pad_token="t0").save_pretrained(model)
    train = directory / "train.jsonl"
    train.write_text(json.dumps({"question": QUESTION, "answer": "5"}) + "\n")
    return model_config(
        model,
        run={"dir": str(directory / "run")},
        data={"train": str(train)},
        rollout={"responses_per_prompt": 4, "max_response_tokens": 8, "window": 64},
        schedule={"prompts_per_iteration": 1},
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
            producer = Producer(
                *(config, pool, make_environment(config, tokenizer), rewards, buffer),
                *(ScheduleController(Rules.of(config), work), Sampling(8, 1.0), Timeline(None, ""), work, store_thread),
            )
            read = load_prompts(config.data.datasets[0], tokenizer, config.data, "data.train")
            await producer.produce(0, list(read.prompts))


def reward_worker(config: Config) -> None:
    """Does the work of the pool's worker here, which does it unseen in a process of its own."""
    from pa_npu.rewards.worker import compute

    functions = [(spec, build_function(spec)) for spec in function_specs(config.reward)]
    compute(functions, RewardInput(QUESTION, "5", [f"{QUESTION} #### 5"], [9], {}))
    assert call_function(functions[0][1], RewardInput(QUESTION, "5", ["#### 5"], [3], {})) == ([1.0], None)


def test_the_document_says_how_many_files_there_are() -> None:
    text = " ".join((PACKAGE.parent / "docs" / "architecture.md").read_text().split())
    counts = (
        f"{MOST_FILES} files are steps, {MOST_WITH_HANDS} with those that hand it on, and {MOST_THAT_CARRY} hold it."
    )
    assert counts in text, counts


def test_producing_reads_on_one_page() -> None:
    tree = ast.parse((PACKAGE / PRODUCER).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    produce = next(node for node in functions if node.name == "produce")
    assert produce.end_lineno is not None and produce.end_lineno - produce.lineno + 1 <= MOST_LINES
    inner = [node.name for function in functions for node in ast.walk(function) if node in functions]
    assert sorted(inner) == sorted(node.name for node in functions), "a function within another one"


def test_a_prompt_takes_the_way_that_is_documented_and_it_is_short(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    spec = ModelSpec.read(config.model.path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(config.model.path)
    with single_process(config):
        stage = load_stage(config, spec, PLATFORM)
        learner = learner_of(stage, config, spec)
        buffer = RolloutBuffer(StoreChannel(dist.HashStore()), "run", readers=1)
        with watched() as seen:
            asyncio.run(produce(config, spec, tokenizer, buffer))
            reward_worker(config)
            source = MicrobatchIterator(
                buffer,
                **{"replica": 0, "num_replicas": 1, "iteration": 0, "groups": 1, "order": "prompt"},
                **{"responses_per_microbatch": 4, "shared_prompt": True, "pad_multiple": 1, "timeout_s": 5.0},
            )
            learner.accumulate(source)
            source.finish()
            update = learner.step()
    assert np.isfinite(update.report.grad_norm), "the prompt came through"

    files = seen.given
    carry = {file for file in seen.carry - NOTHING_OF_IT.keys() if not file.startswith(NOT_STEPS)}
    assert NOTHING_OF_IT.keys() <= seen.carry and not seen.rows, f"{sorted(seen.rows)} hold a row"
    way = documented()
    taken = {file for file in files if not file.startswith(NOT_STEPS)}
    unknown = taken - {*way, *HANDS_ON, *ASIDE, *NOTHING_OF_IT}
    assert not unknown, f"{sorted(unknown)}: put it into docs/architecture.md, or say here what it is"
    unused = set(way) - taken
    assert not unused, f"{sorted(unused)}: no prompt comes there; take it out of docs/architecture.md"
    assert not {*HANDS_ON, *ASIDE} - taken, f"{sorted({*HANDS_ON, *ASIDE} - taken)}: nothing comes there"

    assert len(set(way)) <= MOST_FILES, f"{len(set(way))} files"
    assert len({*way, *HANDS_ON}) <= MOST_WITH_HANDS, f"{len({*way, *HANDS_ON})} files, those that hand it on included"
    assert len(carry) <= MOST_THAT_CARRY, f"{len(carry)} files hold it in some variable: {sorted(carry)}"
    assert len(seen.returns) <= MOST_RETURNS, f"the producer gives it away at {sorted(seen.returns)}"
    rooms = [file.partition("/")[0] for file in dict.fromkeys(way)]
    entered = [room for number, room in enumerate(rooms) if number == 0 or rooms[number - 1] != room]
    often = sorted({room for room in entered if entered.count(room) > 2})
    assert not often, f"entered more than twice: {often}"
