"""The real coordinator process over stand-in engines, with the trainers played by the test."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
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

from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, connect
from pa_npu.control.messages import BORDER, REPORT, TRAINERS_RUN_ON, BorderReport
from pa_npu.control.roster import PREFIX as ROSTER_PREFIX
from pa_npu.control.roster import Roster
from pa_npu.control.typed import Topic
from pa_npu.coordinator import main as coordinator
from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.messages import LATE_MANIFEST, MANIFEST, MEMBERS, READY, VERDICT, StageManifest, TrainersReady
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import RolloutBuffer
from tests.helpers.preloaded import start_rank
from tests.helpers.reports import iteration_report, trainers_run_on
from tests.helpers.stand_in_engine import API_KEY, Served

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
GROUPS, RESPONSES, REPLICAS = 12, 4, 2
WAIT_S = 60.0


def write_model(directory: Path) -> None:
    """config.json, tokenizer and a weight file: all that coordinator and checks read of a model."""
    directory.mkdir()
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 100)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(directory)
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
    weights = {"model.embed_tokens.weight": (100, 64), "model.norm.weight": (64,), "lm_head.weight": (100, 64)}
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


class Run:
    """A run directory, a store, and the coordinator as a child process. before: a run directory that it goes on from."""

    def __init__(
        self,
        directory: Path,
        engines: list[Served],
        variables: dict[str, str] | None = None,
        before: Path | None = None,
        **sections: dict[str, object],
    ) -> None:
        write_model(directory / "model")
        for name, count in (("train", 40), ("test", 6)):
            rows = [{"question": f"w{3 + i} w{4 + i}", "answer": f"#### {i}"} for i in range(count)]
            (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree: dict[str, dict[str, object]] = {
            "run": {"dir": str(directory / "run"), "device": "cpu", "seed": 3},
            "model": {"path": str(directory / "model")},
            "data": {
                "train": str(directory / "train.jsonl"),
                "test": str(directory / "test.jsonl"),
                "max_prompt_tokens": 16,
            },
            "rollout": {
                "engines": len(engines),
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
        self.config = Config.model_validate(tree)
        self.dir = Path(self.config.run.dir)
        self.dir.mkdir()
        (self.dir / "config.yaml").write_text(dump_config(self.config))
        if before is not None:
            for name in ("metrics.jsonl", "evaluations.jsonl"):
                shutil.copy(before / name, self.dir)
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.channel = StoreChannel(connect("127.0.0.1", self.server.port, 10.0))
        self.buffer = RolloutBuffer(self.channel, "run", readers=1)
        self.roster = Roster(StoreChannel(connect("127.0.0.1", self.server.port, 10.0), ROSTER_PREFIX), API_KEY)
        self.roster.publish_config(self.config.model_dump(mode="json"))
        for engine in engines:
            self.roster.announce(engine.url)
        self._log = directory / "coordinator.log"
        environment = {
            "PATH": "/usr/bin:/bin",
            "PA_NPU_STORE": f"127.0.0.1:{self.server.port}",
            "VLLM_API_KEY": API_KEY,
            "OMP_NUM_THREADS": "1",
            **(variables or {}),
        }
        self.process = start_rank(
            "tests.helpers.coordinator_run", str(self.dir / "config.yaml"), environment, self._log
        )

    def announce(self, version: int, report: dict[str, Any] | None, *, publishes: bool = True) -> None:
        """Weight version `version`, with the report of the iteration before, as fields of UpdateReport."""
        if report is not None:
            REPORT.put(self.channel, iteration_report(version - 1, **report), iteration=version - 1)
        BORDER.put(self.channel, BorderReport(border_wait_s=0.0), version=version)
        READY.put(self.channel, TrainersReady(version, publishes), version=version)

    def announce_weights(self) -> None:
        for kind, topic in (("publish", MANIFEST), ("late", LATE_MANIFEST)):
            topic.put(self.channel, StageManifest(f"{kind}-0", {}), stage=0)
        TRAINERS_RUN_ON.put(self.channel, trainers_run_on())

    def published(self, version: int, attempt: int = 0) -> dict[str, Any]:
        """Members and verdict of an attempt."""
        place = {"version": version, "attempt": attempt}
        return asdict(self.message(MEMBERS, **place)) | asdict(self.message(VERDICT, **place))

    def message(self, topic: Topic[T], **place: int) -> T:
        """Waits for the coordinator's message; fails with its output if it ends without."""
        self._wait(topic.at(**place))
        return topic.get(self.channel, **place)

    def _wait(self, key: str) -> bytes:
        """The value of a key that the coordinator puts; fails with its output when it ends without."""
        for _ in range(int(WAIT_S)):
            try:
                return self.channel.wait_bytes(key, 1.0, key)
            except DeadlineExceeded:
                if self.process.poll() is not None:
                    break
        self.process.kill()
        raise AssertionError(f"no {key} from the coordinator, which said:\n{self.end()}")

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, f"{what}: {self.end()}"
            time.sleep(0.05)

    def consume(self, iteration: int, slots: int = GROUPS // REPLICAS) -> list[Group]:
        """All groups of an iteration, slot by slot, as the replicas would."""
        groups = []
        for slot in range(slots):
            for replica in range(REPLICAS):
                self.buffer.wait(iteration, replica, slot, WAIT_S)
                groups.append(self.buffer.read(iteration, replica, slot))
                self.buffer.done(iteration, replica, slot)
        return groups

    def end(self) -> str:
        """Everything the coordinator printed."""
        self.process.wait(WAIT_S)
        return self._log.read_text()

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.dir / name).read_text().splitlines()]


def main(config_file: str) -> None:
    """Runs a coordinator, in a process that `Run` has forked."""
    sys.argv[1:] = ["--config", config_file]
    sys.exit(coordinator.main())
