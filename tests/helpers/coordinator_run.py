"""The real coordinator process over stand-in engines, with the trainers played by the test: the driver of all such tests."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.checkpoints.ahead import write_ahead
from pa_npu.checkpoints.directories import META_FILE, CheckpointMeta, directory_name
from pa_npu.checkpoints.provenance import config_tree
from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, connect
from pa_npu.control.messages import (
    BORDER,
    DATA_POSITION,
    REPORT,
    TRAINERS_RUN_ON,
    UPDATE_SIZE,
    BorderReport,
)
from pa_npu.control.roster import PREFIX as ROSTER_PREFIX
from pa_npu.control.roster import Roster
from pa_npu.control.typed import Topic
from pa_npu.coordinator import episode
from pa_npu.coordinator import main as coordinator
from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.messages import (
    LATE_MANIFEST,
    MANIFEST,
    MEMBERS,
    READY,
    VERDICT,
    StageManifest,
    TrainersReady,
)
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.trainer.border import rollouts_ahead
from tests.helpers import fault_in_run
from tests.helpers.preloaded import start_rank
from tests.helpers.reports import iteration_report, trainers_run_on
from tests.helpers.stand_in_engine import API_KEY, Served, stand_in_engines
from tools.stand_in import Speed

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
GROUPS, RESPONSES, REPLICAS = 12, 4, 2
WAIT_S = 150.0
FAST = Speed(step_s=0.0005, stride=4)


def write_model(directory: Path) -> None:
    """config.json, tokenizer and a weight file: all that coordinator and checks read of a model."""
    directory.mkdir()
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 100)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(directory)
    model = {
        "model_type": "llama",  # transformers 5 replaces the pre-tokenizer of qwen2 models
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 100,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(model))
    weights = {
        "model.embed_tokens.weight": (100, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (100, 64),
    }
    for layer in range(2):
        weights |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in (
                ("input_layernorm", (64,)),
                ("post_attention_layernorm", (64,)),
                ("self_attn.q_proj", (64, 64)),
                ("self_attn.k_proj", (32, 64)),
                ("self_attn.v_proj", (32, 64)),
                ("self_attn.o_proj", (64, 64)),
                ("mlp.gate_proj", (64, 64)),
                ("mlp.up_proj", (64, 64)),
                ("mlp.down_proj", (64, 64)),
            )
        }
    tensors = {name: np.ones(shape, np.float32) for name, shape in weights.items()}
    save_file(tensors, directory / "model.safetensors")


def write_inputs(directory: Path) -> Path:
    """Writes model/, train.jsonl (40 questions), test.jsonl (6), and many.jsonl and few.jsonl (40
    and 30) with other columns.
    """
    write_model(directory / "model")
    for name, count in (("train", 40), ("test", 6)):
        rows: list[dict[str, Any]] = [
            {"question": f"w{3 + i} w{4 + i}", "answer": f"#### {i}"} for i in range(count)
        ]
        write_lines(directory / f"{name}.jsonl", rows)
    for name, numbers in (("many", range(40)), ("few", range(40, 70))):
        write_lines(
            directory / f"{name}.jsonl",
            [{"q": f"w{3 + i} w{4 + i}", "a": {"final": str(i)}} for i in numbers],
        )
    return directory


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Run:
    """A run directory, a store, and the coordinator as a child process.

    engines: the stand-ins. trained: groups by iteration. verdicts: members and verdict by version.
    states: of the prompt stream by version.
    """

    def __init__(
        self,
        directory: Path,
        inputs: Path,
        engines: list[Served],
        known: int,
        variables: dict[str, str],
        sections: dict[str, dict[str, Any]],
    ) -> None:
        tree: dict[str, dict[str, Any]] = {
            "run": {"dir": str(directory / "run"), "device": "cpu", "seed": 3},
            "model": {"path": str(inputs / "model")},
            "data": {"train": str(inputs / "train.jsonl"), "test": None, "max_prompt_tokens": 16},
            "rollout": {
                "engines": max(known, 1),
                "responses_per_prompt": RESPONSES,
                "max_response_tokens": 24,
                "window": 8,
            },
            "reward": {"functions": [{"name": "format", "pattern": "t[1-5]"}]},
            "trainer": {"devices": REPLICAS},
            "schedule": {"iterations": 2, "prompts_per_iteration": GROUPS},
            "publish": {"probe_tokens": 5},
            "telemetry": {"trackers": []},
        }
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values}
        config = Config.model_validate(tree)
        schedule = tree["schedule"]
        if "skip_zero_advantage" not in schedule and build_algorithm(config).trains_by_rule:
            # the trainers of these tests look into every group
            tree["schedule"] = {**schedule, "skip_zero_advantage": False}
            config = Config.model_validate(tree)
        self.config = config
        self.engines = engines
        self.trained: dict[int, list[Group]] = {}
        self.verdicts: dict[int, dict[str, Any]] = {}
        self.states: dict[int, dict[str, Any]] = {}
        self.directory = directory
        self.dir = Path(self.config.run.dir)
        self.dir.mkdir()
        (self.dir / "config.yaml").write_text(dump_config(self.config))
        key_file = self.dir / "api_key"
        key_file.write_text(API_KEY + "\n")
        key_file.chmod(0o600)
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.channel = StoreChannel(connect("127.0.0.1", self.server.port, 10.0))
        self.buffer = RolloutBuffer(self.channel, "run", readers=1)
        self.roster = Roster(
            StoreChannel(connect("127.0.0.1", self.server.port, 10.0), ROSTER_PREFIX), API_KEY
        )
        self.roster.publish_config(self.config.model_dump(mode="json"))
        for engine in engines[:known]:
            self.roster.announce(engine.url)
        self._log = directory / "coordinator.log"
        environment = {
            "PATH": "/usr/bin:/bin",
            "PA_NPU_STORE": f"127.0.0.1:{self.server.port}",
            "VLLM_API_KEY": API_KEY,
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        self.process = start_rank(
            "tests.helpers.coordinator_run", str(self.dir / "config.yaml"), environment, self._log
        )

    def play(self, first: int = 0, skipped: frozenset[int] = frozenset()) -> None:
        """Plays trainers from version `first` to the end. A run from version 0 leaves the first
        checkpoint that is due.

        skipped: versions that they do not publish.
        """
        self.announce_weights()
        iterations = self.config.schedule.iterations
        for version in range(first, iterations + 1):
            self.announce(
                version,
                None if version == first else {"loss": 0.0},
                publishes=version not in skipped,
            )
            if version not in skipped:
                self.published(version)
            if not first and 0 < version == self.config.checkpoint.every:
                self._save_checkpoint(version)
            if version < iterations:
                self.consume(version)
                position = DATA_POSITION.wait(self.channel, WAIT_S, iteration=version + 1)
                self.states[version + 1] = position.state
        self.finish()

    def begin(self) -> dict[str, Any]:
        """Publishes version 0."""
        self.announce_weights()
        return self.publish(0)

    def publish(self, version: int, **report: Any) -> dict[str, Any]:
        """Plays a border; returns members and verdict. report: of the iteration before, as fields
        of UpdateReport.
        """
        self.announce(version, {"loss": 0.0, **report} if version else None)
        return self.published(version)

    def announce(
        self, version: int, report: dict[str, Any] | None, *, publishes: bool = True
    ) -> None:
        if report is not None:
            REPORT.put(self.channel, iteration_report(version - 1, **report), iteration=version - 1)
        BORDER.put(self.channel, BorderReport(border_wait_s=0.0), version=version)
        READY.put(self.channel, TrainersReady(version, publishes), version=version)

    def announce_weights(self) -> None:
        for kind, topic in (("publish", MANIFEST), ("late", LATE_MANIFEST)):
            topic.put(self.channel, StageManifest(f"{kind}-0", {}), rank=0)
        TRAINERS_RUN_ON.put(self.channel, trainers_run_on())

    def published(self, version: int, attempt: int = 0) -> dict[str, Any]:
        """Members and verdict of an attempt."""
        place = {"version": version, "attempt": attempt}
        self.verdicts[version] = asdict(self.message(MEMBERS, **place)) | asdict(
            self.message(VERDICT, **place)
        )
        return self.verdicts[version]

    def message(self, topic: Topic[T], **place: int) -> T:
        """Waits for the coordinator's message; fails with its output if it ends without."""
        key = topic.at(**place)
        for _ in range(int(WAIT_S)):
            try:
                self.channel.wait_bytes(key, 1.0, key)
                return topic.get(self.channel, **place)
            except DeadlineExceeded:
                if self.process.poll() is not None:
                    break
        self.process.kill()
        raise AssertionError(f"no {key} from the coordinator, which said:\n{self.end()}")

    def wait_until(self, condition: Callable[[], bool], description: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, (
                f"{description}: {self.end()}"
            )
            time.sleep(0.05)

    def wait_for_group(self, engine: int = 0) -> None:
        """Waits until an engine has been asked for a group."""
        assert self.engines[engine].wait_for_request(
            lambda request: request["n"] == RESPONSES, WAIT_S
        ), self.end()

    def consume(self, iteration: int) -> list[Group]:
        """All groups of an iteration, slot by slot, as the replicas would."""
        slots = self.config.groups_per_replica
        if self.config.schedule.tokens_per_update:
            slots = self.message(UPDATE_SIZE, iteration=iteration).groups
        groups = []
        for slot in range(slots):
            for replica in range(REPLICAS):
                self.buffer.wait(iteration, replica, slot, WAIT_S)
                groups.append(self.buffer.read(iteration, replica, slot))
                self.buffer.done(iteration, replica, slot)
        assert sorted(group.index for group in groups) == list(range(len(groups))), (
            "I2: every group exactly once"
        )
        self.trained[iteration] = groups
        return groups

    def end(self) -> str:
        """Everything the coordinator printed."""
        self.process.wait(WAIT_S)
        return self.output

    def finish(self) -> str:
        """The same of a coordinator that ends by itself, and well."""
        output = self.end()
        assert self.process.returncode == 0, output
        return output

    @property
    def output(self) -> str:
        return self._log.read_text()

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.dir / name).read_text().splitlines()]

    @property
    def records(self) -> dict[int, dict[str, Any]]:
        """metrics.jsonl by iteration."""
        return {record["iteration"]: record for record in self.lines("metrics.jsonl")}

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Those for groups, of all engines."""
        return [r for served in self.engines for r in served.engine.requests if r["n"] == RESPONSES]

    @property
    def sampled(self) -> set[int]:
        """Seeds of the requests for groups."""
        return {request["seed"] for request in self.requests}

    def calls(self, engine: int) -> list[tuple[str, list[Any]]]:
        """Calls that an engine's workers got."""
        return [call for call in self.engines[engine].engine.calls if call[0] != "pa_version"]

    @property
    def checkpoint(self) -> Path:
        return self.directory / directory_name(self.config.checkpoint.every)

    def _save_checkpoint(self, version: int) -> None:
        """Writes the part of a checkpoint that the coordinator reads, as trainers do: before
        anything of the version is trained.
        """
        self.checkpoint.mkdir()
        write_ahead(
            self.checkpoint, rollouts_ahead(self.config, self.channel, self.buffer, version)
        )
        meta = CheckpointMeta(
            version=version,
            updates=version,
            data=self.states[version],
            seed=3,
            layout={},
            model={"path": "", "fingerprint": ""},
            reference=None,
            config=config_tree(self.config),
            config_digest="",
            files={},
            digests={},
        )
        (self.checkpoint / META_FILE).write_text(meta.dump())


@contextmanager
def coordinator_run(
    directory: Path,
    inputs: Path,
    engines: int = 1,
    speed: Speed = FAST,
    known: int | None = None,
    variables: dict[str, str] | None = None,
    **sections: dict[str, Any],
) -> Iterator[Run]:
    """Starts stand-in engines, of which the run is told of the first `known` (None: all), and the
    coordinator; ends them.
    """
    with stand_in_engines(engines, speed) as served:
        run = Run(
            directory,
            inputs,
            served,
            engines if known is None else known,
            variables or {},
            sections,
        )
        try:
            yield run
        finally:
            run.process.kill()
            run.process.wait(10)


def main(config_file: str) -> None:
    """Runs a coordinator, in a process that `Run` has forked, with the fault that a test names."""
    if fault := os.environ.get(fault_in_run.VARIABLE):
        fault_in_run.into_sessions(fault, episode)
    sys.argv[1:] = ["--config", config_file]
    sys.exit(coordinator.main())
