"""The real coordinator process between stand-in engines and a trainer played by the test."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from pa_npu.buffer.group import Group
from pa_npu.buffer.rollout_buffer import StoreRolloutBuffer
from pa_npu.buffer.store import StoreChannel, connect
from pa_npu.config import Config, dump_config
from pa_npu.errors import DeadlineExceeded
from pa_npu.rollout.roster import PREFIX as ROSTER_PREFIX
from pa_npu.rollout.roster import Roster
from pa_npu.rollout.seeds import group_seed
from pa_npu.rollout.stand_in import Speed
from tests.helpers.stand_in_engine import API_KEY, Served, stand_in_engines

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]
GROUPS, RESPONSES, REPLICAS = 12, 4, 2
WAIT_S = 60.0


def write_model(directory: Path) -> None:
    """config.json and tokenizer: all that the coordinator reads of a model."""
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


class Run:
    """A run directory, a store, and the coordinator as a child process."""

    def __init__(
        self,
        directory: Path,
        engines: list[Served],
        environment: dict[str, str] | None = None,
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
            "telemetry": {"tensorboard": False},
        }
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values}
        self.config = Config.model_validate(tree)
        self.dir = Path(self.config.run.dir)
        self.dir.mkdir()
        (self.dir / "config.yaml").write_text(dump_config(self.config))
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.channel = StoreChannel(connect("127.0.0.1", self.server.port, 10.0))
        self.buffer = StoreRolloutBuffer(self.channel, "run", readers=1)
        self.roster = Roster(StoreChannel(connect("127.0.0.1", self.server.port, 10.0), ROSTER_PREFIX))
        for engine in engines:
            self.roster.announce(engine.url)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pa_npu.rollout.coordinator", "--config", str(self.dir / "config.yaml")),
            ],
            env={
                "PATH": "/usr/bin:/bin",
                "PA_NPU_STORE": f"127.0.0.1:{self.server.port}",
                "VLLM_API_KEY": API_KEY,
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
            },
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def announce(self, version: int, report: dict[str, float] | None) -> None:
        self.channel.put_json(f"publish/{version}/ready", {"version": version, "report": report})

    def announce_weights(self) -> None:
        for kind in ("publish", "late"):
            self.channel.put_json(f"{kind}/manifest/0", {"name": f"{kind}-0", "manifest": {}})

    def published(self, version: int, attempt: int = 0) -> dict[str, Any]:
        """Members and verdict of an attempt."""
        members = json.loads(self._wait(f"publish/{version}/{attempt}/members"))
        return members | json.loads(self._wait(f"publish/{version}/{attempt}/verdict"))

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

    def consume(self, iteration: int) -> list[Group]:
        """All groups of an iteration, slot by slot, as the replicas would."""
        groups = []
        for slot in range(GROUPS // REPLICAS):
            for replica in range(REPLICAS):
                self.buffer.wait(iteration, replica, slot, WAIT_S)
                groups.append(self.buffer.read(iteration, replica, slot))
                self.buffer.done(iteration, replica, slot)
        return groups

    def end(self) -> str:
        """Everything the coordinator printed."""
        output, _ = self.process.communicate(timeout=WAIT_S)
        return output

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.dir / name).read_text().splitlines()]


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.process.kill()
        run.process.wait(10)


def test_two_engines_share_two_iterations_and_everything_is_recorded(tmp_path, runs):
    with stand_in_engines(2, Speed(step_s=0.001, stride=4)) as engines:
        run = Run(tmp_path, engines)
        runs.append(run)
        run.announce_weights()
        all_groups = []
        for version in range(3):
            report = {"loss": 0.5 * version, "train_s": 1.0, "wait_s": 0.01, "tokens_computed": 1234}
            run.announce(version, report if version else None)
            done = run.published(version)
            assert done["done"] and (done["epoch"], done["workers"]) == (0, 2), "the same two engines, every time"
            assert [len(response["tokens"]) for response in done["probe"]["responses"]] == [5, 5], (
                "one sample per engine"
            )
            if version < 2:
                all_groups.append(run.consume(version))
        output = run.end()
    assert run.process.returncode == 0, output

    for iteration, groups in enumerate(all_groups):
        assert sorted(group.index for group in groups) == list(range(GROUPS)), "I2: every group exactly once"
        assert {(group.iteration, group.version) for group in groups} == {(iteration, iteration)}, "I1"
        assert all(group.num_responses == RESPONSES for group in groups)
    prompt_ids = [group.prompt_id for groups in all_groups for group in groups]
    assert len(set(prompt_ids)) == 2 * GROUPS, "40 prompts hold two iterations without repetition"

    # sampling parameters and seeds arrived; engines were asked in protocol order and share the load
    training = [request for served in engines for request in served.engine.requests if request["n"] == RESPONSES]
    assert {request["seed"] for request in training} == {group_seed(3, i, g) for i in range(2) for g in range(GROUPS)}
    for number, served in enumerate(engines):
        calls = [name for name, _ in served.engine.calls]
        assert calls == ["pa_connect", *(["pa_receive", "reset_prefix_cache"] * 3)]
        host, port, rank_offset, world_size, stages, backend, _ = served.engine.calls[0][1]
        assert (host, port) == ("127.0.0.1", run.server.port) and (rank_offset, world_size) == (1 + number, 3)
        assert stages == [{"name": "publish-0", "manifest": {}}] and backend == "gloo"
        assert served.engine.version == 2

    records = run.lines("metrics.jsonl")
    assert [(record["iteration"], record["version"]) for record in records] == [(0, 0), (1, 1)]
    for record, groups, version in zip(records, all_groups, (1, 2), strict=True):
        tokens = sum(group.num_response_tokens for group in groups)
        assert record["loss"] == 0.5 * version and record["train_s"] == 1.0, "the report of this iteration"
        assert record["trainer_idle"] == pytest.approx(0.01 / record["iteration_s"])
        assert record["tokens_response"] == tokens and record["groups"] == GROUPS
        assert record["tokens_prompt"] == RESPONSES * sum(len(group.prompt_tokens) for group in groups)
        assert record["tokens_computed"] == 1234, "the trainers know what they computed"
        assert record["devices"] == 4 and record["window"] == 8
        assert record["tpspd"] == pytest.approx((tokens + record["tokens_prompt"]) / record["iteration_s"] / 4)
        assert record["reward_mean"] == pytest.approx(sum(group.rewards.sum() for group in groups) / GROUPS / RESPONSES)
        assert 0 <= record["engine_idle"] <= 1 and 0 < record["generate_s"] <= record["iteration_s"]
        requests = [engine["requests"] for engine in record["engines"].values()]
        assert sum(requests) >= GROUPS and min(requests) >= GROUPS // 4, f"both engines work: {requests}"
    assert [evaluation["version"] for evaluation in run.lines("evaluations.jsonl")] == [0, 2]
    assert all(evaluation["questions"] == 6 for evaluation in run.lines("evaluations.jsonl"))
    assert records[0]["eval_accuracy"] == run.lines("evaluations.jsonl")[0]["accuracy"]
    samples = run.lines("samples.jsonl")
    assert [(sample["iteration"], sample["index"]) for sample in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    progress = [line for line in output.splitlines() if line.startswith("| iteration")]
    assert len(progress) == 2 and "1/2" in progress[0] and "2/2" in progress[1]


def contents(groups: list[Group]) -> list[tuple[int, int, bytes, bytes]]:
    """What is trained, whatever the order of arrival."""
    return sorted((g.index, g.prompt_id, g.response_tokens.tobytes(), g.advantages.tobytes()) for g in groups)


def no_evaluation(directory: Path) -> dict[str, object]:
    return {"train": str(directory / "train.jsonl"), "test": None, "max_prompt_tokens": 16}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, int, bytes, bytes]]:
    """Iteration 0 of a run with two quick engines that live."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with stand_in_engines(2, Speed(stride=4)) as engines:
        run = Run(directory, engines, data=no_evaluation(directory))
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        groups = run.consume(0)
        run.process.kill()
        run.end()
    return contents(groups)


def test_a_dead_engines_groups_come_from_the_other_and_the_iteration_is_the_same(tmp_path, runs, undisturbed):
    # 24 tokens take at least 2.4 s, so groups are in flight when the engine dies
    with stand_in_engines(2, Speed(step_s=0.1)) as engines:
        run = Run(tmp_path, engines, data=no_evaluation(tmp_path))
        runs.append(run)
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        assert engines[0].wait_for_request(lambda request: request["n"] == RESPONSES, WAIT_S), run.end()
        engines[0].stop()
        engines[1].engine.speed = Speed(stride=4)
        assert contents(run.consume(0)) == undisturbed
        assert run.roster.replacement_wanted(0, 0), "the launcher is asked for another"
        run.announce(1, {"loss": 0.0})
        done = run.published(1)
        assert (done["epoch"], done["workers"]) == (1, 1), "the trainers publish to the one that is left"
        connects = [args for name, args in engines[1].engine.calls if name == "pa_connect"]
        assert [args[2:4] for args in connects] == [[2, 3], [1, 2]]
        assert [args[4][0]["name"] for args in connects] == ["publish-0", "publish-0.1"]


def test_the_only_engines_successor_gets_the_iterations_weights_before_it_serves(tmp_path, runs, undisturbed):
    with stand_in_engines(1, Speed(step_s=0.1)) as engines:
        run = Run(tmp_path, engines, data=no_evaluation(tmp_path))
        runs.append(run)
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        assert engines[0].wait_for_request(lambda request: request["n"] == RESPONSES, WAIT_S), run.end()
        engines[0].stop()
        successor = engines[0].start_again(Speed(stride=4))
        try:
            run.roster.renew(0, 1)
            assert json.loads(run._wait("late/0")) == {"version": 0, "workers": 1}
            assert not successor.engine.requests, "it holds no weights yet"
            run.channel.put_json("late/0/answer/0", True)
            assert json.loads(run._wait("late/0/go"))
            assert contents(run.consume(0)) == undisturbed
            calls = [(name, args) for name, args in successor.engine.calls if name != "pa_version"]
            assert [name for name, _ in calls] == ["pa_connect", "pa_receive", "reset_prefix_cache"]
            assert calls[0][1][4][0]["name"] == "late-0" and calls[1][1] == [0]
        finally:
            successor.stop()


def test_a_hung_engine_is_found_by_a_probe_and_its_health_page_does_not_count(tmp_path, runs, undisturbed):
    rollout = {"engines": 2, "responses_per_prompt": RESPONSES, "max_response_tokens": 24, "window": 8}
    with stand_in_engines(2, Speed(stride=4, step_s=0.02)) as engines:
        run = Run(
            tmp_path,
            engines,
            data=no_evaluation(tmp_path),
            rollout=rollout | {"probe_every_s": 0.2, "probe_timeout_s": 6.0, "request_timeout_s": 600},
        )
        runs.append(run)
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        assert engines[1].wait_for_request(lambda request: request["n"] == RESPONSES, WAIT_S), run.end()
        engines[1].engine.speed = Speed(step_s=3600)
        assert contents(run.consume(0)) == undisturbed
        wanted = run.roster.replacement_wanted(1, 0)
        assert wanted and "did not generate a token when probed" in wanted


def test_engines_join_at_the_next_publish_and_leave_when_they_have_finished(tmp_path, runs):
    with stand_in_engines(2, Speed(step_s=0.002, stride=4)) as engines:
        run = Run(
            tmp_path,
            engines[:1],
            data=no_evaluation(tmp_path),
            schedule={"iterations": 4, "prompts_per_iteration": GROUPS},
        )
        runs.append(run)
        run.announce_weights()
        run.announce(0, None)
        assert run.published(0)["workers"] == 1
        index = run.roster.announce(engines[1].url, restarts=False)
        run.consume(0)
        assert not engines[1].engine.requests
        run.announce(1, {"loss": 0.0})
        assert run.published(1)["workers"] == 2
        run.consume(1)
        joined = len([request for request in engines[1].engine.requests if request["n"] == RESPONSES])
        assert joined >= GROUPS // 4
        run.announce(2, {"loss": 0.0})
        run.published(2)
        run.roster.ask_leave(index)
        run.consume(2)
        run._wait_until(lambda: run.roster.has_left(index), "the engine has left")
        engines[1].stop()
        run.announce(3, {"loss": 0.0})
        assert run.published(3)["workers"] == 1
        run.consume(3)
        run.announce(4, {"loss": 0.0})
        run.published(4)
        output = run.end()
    assert run.process.returncode == 0, output
    records = run.lines("metrics.jsonl")
    assert [record["devices"] for record in records] == [REPLICAS + engines for engines in (1, 2, 2, 1)]
    assert [len(record["engines"]) for record in records] == [2, 2, 1, 1], "those known at the end of the iteration"


def test_without_any_engine_left_the_coordinator_ends_with_one_line(tmp_path, runs):
    with stand_in_engines(1, Speed(step_s=0.1)) as engines:
        run = Run(tmp_path, [], data=no_evaluation(tmp_path), rollout={"engines": 1, "window": 8})
        runs.append(run)
        run.roster.announce(engines[0].url, restarts=False)
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        assert engines[0].wait_for_request(lambda request: request["n"] > 1, WAIT_S), run.end()
        engines[0].stop()
        output = run.end()
    assert run.process.returncode == 1, output
    last = output.strip().splitlines()[-1]
    assert "no engine is left" in last and engines[0].url in last and "Traceback" not in output, output


def test_a_publish_that_the_trainers_cannot_complete_is_made_again(tmp_path, runs):
    with stand_in_engines(2, Speed(stride=4)) as engines:
        run = Run(tmp_path, engines, data=no_evaluation(tmp_path), publish={"timeout_s": 30, "probe_tokens": 0})
        runs.append(run)
        engines[0].engine.receive_s = 3600.0  # as if its worker had died inside the load
        run.announce_weights()
        run.announce(0, None)
        run._wait("publish/0/0/members")
        run.channel.put_json("publish/0/0/broken", "the connection broke")
        engines[0].engine.receive_s = 0.0
        first, second = run.published(0, 0), run.published(0, 1)
        assert not first["done"] and "the connection broke" in first["reason"]
        assert second["done"] and (second["epoch"], second["workers"]) == (1, 2)
        abandoned = dist.PrefixStore("publish-0", run.server)
        assert abandoned.check(["abandoned"]), "the workers that still wait are told"
        assert len(run.consume(0)) == GROUPS


def test_a_reward_over_its_time_limit_is_zero_logged_and_counted_and_the_run_goes_on(tmp_path, runs):
    """Of every prompt's number: w3, w7, w11, ... are slow."""
    (tmp_path / "slow_rewards.py").write_text(
        "import time\n"
        "def slow(group):\n"
        "    if int(group.answer.split()[-1]) % 4 == 0:\n"
        "        time.sleep(3600)\n"
        "    return [1.0] * len(group.responses)\n"
    )
    reward = {"functions": [{"name": "slow_rewards:slow"}], "timeout_s": 0.5, "workers": 2}
    with stand_in_engines(1, Speed(stride=4)) as engines:
        data = {"test": None, "shuffle": False, "train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 16}
        environment = {"PYTHONPATH": str(tmp_path)}
        run = Run(
            tmp_path,
            engines,
            environment,
            reward=reward,
            data=data,
            schedule={"iterations": 1, "prompts_per_iteration": GROUPS},
        )
        runs.append(run)
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        groups = {group.index: group for group in run.consume(0)}
        run.announce(1, {"loss": 0.0, "train_s": 1.0, "wait_s": 0.0, "tokens_computed": 1})
        run.published(1)
        output = run.end()
    assert run.process.returncode == 0, output
    assert [groups[index].rewards.tolist() for index in range(GROUPS)] == [
        [0.0 if index % 4 == 0 else 1.0] * RESPONSES for index in range(GROUPS)
    ]
    (record,) = run.lines("metrics.jsonl")
    assert record["reward_errors"] == GROUPS // 4 and record["reward_mean"] == pytest.approx(0.75)
    said = [line for line in output.splitlines() if "reward.timeout_s = 0.5 s" in line]
    assert len(said) == GROUPS // 4 and all("zero for the responses to" in line for line in said), output
    assert "Traceback" not in output


def test_trainers_that_never_come_end_the_coordinator_at_the_deadline(tmp_path, runs):
    with stand_in_engines(1, Speed()) as engines:
        run = Run(tmp_path, engines, trainer={"devices": REPLICAS, "startup_timeout_s": 2})
        runs.append(run)
        output = run.end()
    assert run.process.returncode == 1, output
    assert "DeadlineExceeded" in output.strip().splitlines()[-1] and "pipeline stage 0" in output, output
    assert "Traceback" not in output


def test_bad_input_ends_with_code_2_and_one_line(tmp_path, runs):
    with stand_in_engines(1, Speed()) as engines:
        run = Run(tmp_path, engines, data={"train": str(tmp_path / "none.jsonl"), "test": None})
        runs.append(run)
        output = run.end()
    assert run.process.returncode == 2, output
    assert "none.jsonl" in output.strip().splitlines()[-1] and "Traceback" not in output
