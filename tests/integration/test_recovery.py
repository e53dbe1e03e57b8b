"""Invariant I6: whatever is killed, and whenever, the run ends with the weights of the run that was not killed, bit for bit.

A run is killed over and over: every kind of process in a publish, while engines generate, and while
trainers finish the iteration. It goes on by itself; where the launcher is killed, it is continued
with checkpoint.resume=auto. Nightly every kind is killed at every moment, on both engines;
otherwise every kind but keepers and vLLM's at one, and something at every moment.
"""

from __future__ import annotations

import functools
import itertools
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pa_npu.launcher.placement import free_ports
from pa_npu.telemetry.chrome_trace import read_events
from tests.helpers.engine_process import KEY
from tests.helpers.killed_runs import (
    AGAIN,
    CHANGES,
    ITERATIONS,
    TIMEOUT_S,
    TRANSFORMERS,
    VLLM,
    WORKERS,
    Kills,
    Result,
    Watched,
    assert_equal_when_killed,
    each,
    keys,
    kill_all,
    watched_when_ready,
)
from tests.helpers.launched import Launched

pytestmark = [
    pytest.mark.integration,
    # nine starts of an engine in one test; each wait has a deadline of its own
    pytest.mark.timeout(3600),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(*arguments: str) -> Launched:
        launched.append(
            Launched(tmp_path_factory.mktemp("launched"), "run", *arguments, variables=KEY)
        )
        return launched[-1]

    yield start
    for item in launched:
        item.close()


@pytest.fixture(scope="module")
def undisturbed(
    launch: Callable[..., Launched],
    tiny: Path,
    shared_engine: Callable[[Path], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Result]:
    """Runs with engines of a kind, without a kill, and returns the results."""

    @functools.cache
    def result(backend: str, iterations: int = ITERATIONS) -> Result:
        directory = tmp_path_factory.mktemp("undisturbed") / "run"
        others = (
            {"rollout.attach": shared_engine(tiny / "model")} if backend == "transformers" else {}
        )
        others["schedule.iterations"] = str(iterations)
        run = launch(*keys(tiny, directory, backend, **others))
        run.popen.wait(TIMEOUT_S)
        assert run.popen.returncode == 0, run.output
        return Result.read(directory, iterations)

    return result


@pytest.mark.parametrize(
    ("backend", "kills"),
    [
        # in CI an engine is killed among the others below
        pytest.param(
            "transformers",
            tuple(each([TRANSFORMERS])),
            id="transformers",
            marks=pytest.mark.nightly,
        ),
        pytest.param("vllm", tuple(each(VLLM)), id="vllm-all", marks=pytest.mark.nightly),
    ],
)
def test_engines_that_are_killed_whenever_change_nothing(
    backend: str,
    kills: Kills,
    launch: Callable[..., Launched],
    tiny: Path,
    tmp_path: Path,
    undisturbed: Callable[..., Result],
) -> None:
    """Each comes back with the weights of the iteration; coordinator and trainers go on all the
    time.
    """
    directory = tmp_path / "run"
    watched = watched_when_ready(launch(*keys(tiny, directory, backend)))
    kill_all(watched, kills)
    watched.run.popen.wait(TIMEOUT_S)
    assert watched.run.popen.returncode == 0 and AGAIN not in watched.run.output, watched.run.output
    Result.read(directory).assert_equal(undisturbed(backend))


@pytest.mark.parametrize(
    ("backend", "kills", "iterations", "first"),
    [
        # as short as it can be: the first iteration is the one that there is nothing to go on from
        pytest.param(
            "transformers",
            (
                (TRANSFORMERS, "generation"),
                ("trainer-1", "training"),
                ("coordinator", "generation"),
            ),
            6,
            1,
            id="transformers",
        ),
        pytest.param(
            "transformers",
            tuple(each(["reward worker", *WORKERS])),
            ITERATIONS,
            0,
            id="transformers-all",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "vllm",
            tuple(each(["reward worker", *WORKERS])),
            ITERATIONS,
            0,
            id="vllm-all",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_engines_trainers_coordinator_reward_workers_and_launcher_that_are_killed_whenever_change_nothing(
    backend: str,
    kills: Kills,
    iterations: int,
    first: int,
    launch: Callable[..., Launched],
    tiny: Path,
    tmp_path: Path,
    undisturbed: Callable[..., Result],
) -> None:
    """Groups lie with the trainers that are killed, whose ends are theirs; undisturbed they lie in
    the store on the head.
    """
    directory = tmp_path / "run"
    others = {"schedule.iterations": iterations}
    killed = launch(*keys(tiny, directory, backend, buffer__shards="node", **others))
    watched = watched_when_ready(killed, iterations=iterations)
    kill_all(watched, kills, first=first)
    assert "the run continues from" in watched.run.output, watched.run.output
    watched.wait_for("training", iterations - 2)  # or in the last one
    watched.run.popen.kill()
    watched.run.popen.wait(30)
    watched.run.assert_nothing_survives()
    for record in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        assert 0 < record["rollout_head_bytes"] < 0.5 * record["rollout_buffer_bytes"], (
            "they were in shards"
        )

    last = launch(*keys(tiny, directory, backend, checkpoint__resume="auto", **others))
    last.popen.wait(TIMEOUT_S)
    assert last.popen.returncode == 0, last.output
    assert "the run continues from" in last.output
    Result.read(directory, iterations).assert_equal(undisturbed(backend, iterations))


@pytest.mark.nightly
def test_keepers_that_are_killed_and_engines_that_hang_change_nothing_either(
    launch: Callable[..., Launched],
    tiny: Path,
    tmp_path: Path,
    undisturbed: Callable[..., Result],
) -> None:
    directory = tmp_path / "run"
    others = {"rollout.probe_timeout_s": 15.0, "publish.timeout_s": 60.0}
    watched = watched_when_ready(launch(*keys(tiny, directory, "vllm", **others)))
    kill_all(watched, each(["keeper of engine-0"]))
    kill_all(watched, each(["VLLM::EngineCore"]), signal.SIGSTOP)
    watched.run.popen.wait(TIMEOUT_S)
    assert watched.run.popen.returncode == 0, watched.run.output
    Result.read(directory).assert_equal(undisturbed("vllm"))


@pytest.mark.parametrize(
    ("kills", "number"),
    [
        pytest.param(
            (("engine-1", "publish"),), signal.SIGKILL, id="engine", marks=pytest.mark.nightly
        ),
        pytest.param(
            tuple(each(["engine-1", "engine-0", *WORKERS])),
            signal.SIGKILL,
            id="all",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            tuple(
                itertools.product(
                    ["engine-1", "engine-0", "trainer-0", "trainer-1", "coordinator"], CHANGES
                )
            ),
            signal.SIGKILL,
            id="changes",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            tuple(itertools.product(["engine-1", "engine-0"], [*CHANGES, "training"])),
            signal.SIGSTOP,
            id="stopped",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_run_whose_devices_decode_then_train_ends_with_the_weights_of_one_that_was_not_disturbed(
    kills: Kills,
    number: int,
    launch: Callable[..., Launched],
    tiny: Path,
    tmp_path: Path,
    undisturbed: Callable[..., Result],
) -> None:
    """engine-k is beside trainer-k, roles change at every chance.

    No group ends on an engine whose device trains.
    """
    directory = tmp_path / "run"
    (port,) = free_ports("127.0.0.1", 1)
    shared = {
        "placement.colocate": "true",
        "rollout.engines": 2,
        "environment.name": "tests.helpers.scripted_schedules:ChangesRoles",
        "placement.port": port - 1,
    }
    if number == signal.SIGSTOP:  # which deadlines alone find
        shared |= {"rollout.probe_timeout_s": 15.0, "publish.timeout_s": 60.0}
    watched = Watched(launch(*keys(tiny, directory, "transformers", **shared)), engine_port=port)
    watched.run.wait_for(
        lambda: "engine-1 ready" in watched.run.output, "the engine is ready", TIMEOUT_S
    )
    kill_all(watched, kills, number, directory)
    watched.run.popen.wait(TIMEOUT_S)
    assert watched.run.popen.returncode == 0, watched.run.output
    Result.read(directory).assert_equal(undisturbed("transformers"))
    events = read_events(directory / "timeline" / "coordinator.jsonl")
    for engine in range(2):
        trains = [
            event
            for event in events
            if event.get("lane") == f"role of engine {engine}" and event["name"] == "trains"
        ]
        lane = f"engine http://127.0.0.1:{port + engine}"
        ends = [
            event["end"]
            for event in events
            if event.get("lane") == lane and event["name"].startswith("group ")
        ]
        assert trains and ends, "there is something to compare"
        assert not [end for end in ends for role in trains if role["start"] < end < role["end"]], (
            "it decodes and trains"
        )
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert all(record["devices"] == 2 for record in records), "each counts once"
    assert any(record["role_changes"] for record in records), (
        "negative control: sequences were handed on"
    )


LORA = {"lora.rank": 4, "checkpoint.export_hf": "merged"}
TWO: Kills = (("trainer-1", "training"), ("coordinator", "generation"))
ALL: Kills = tuple(each([VLLM[1], *WORKERS]))


@pytest.mark.parametrize(
    ("backend", "kills", "trained"),
    [
        pytest.param("transformers", TWO, LORA, id="adapters-some", marks=pytest.mark.nightly),
        pytest.param("vllm", ALL, LORA, id="adapters-vllm-all", marks=pytest.mark.nightly),
        pytest.param("transformers", TWO, {}, id="weights-some", marks=pytest.mark.nightly),
        pytest.param("vllm", ALL, {}, id="weights-vllm-all", marks=pytest.mark.nightly),
    ],
)
def test_a_periodic_run_of_sharded_trainers_ends_with_the_weights_of_the_synchronous_one_whatever_is_killed(
    backend: str,
    kills: Kills,
    trained: dict[str, object],
    launch: Callable[..., Launched],
    tiny: Path,
    tmp_path: Path,
) -> None:
    """Adapters, and all weights; with a reference."""
    sharded = {"trainer.backend": "fsdp", "algorithm.kl_coef": 0.01, **trained}
    calm = keys(tiny, tmp_path / "calm", backend, schedule__stream="false", **sharded)
    assert_equal_when_killed(
        calm, keys(tiny, tmp_path / "run", backend, **sharded), kills, launch, tmp_path
    )


@pytest.mark.parametrize(
    ("backend", "kills"),
    [
        pytest.param(
            "transformers",
            (
                (TRANSFORMERS, "generation"),
                ("trainer-1", "training"),
                ("coordinator", "generation"),
            ),
        ),
        pytest.param("vllm", tuple(each([VLLM[1], *WORKERS]))),
    ],
    ids=["some", "vllm-all"],
)
@pytest.mark.nightly
def test_a_mixture_whose_experts_replicas_share_ends_with_the_same_weights_whatever_is_killed(
    backend: str, kills: Kills, launch: Callable[..., Launched], tiny_mixture: Path, tmp_path: Path
) -> None:
    """Checkpoints have each expert once, and an engine that comes again is sent them inside the
    iteration.
    """
    shared = {"trainer.expert_parallel": 2}
    calm = keys(tiny_mixture, tmp_path / "calm", backend, **shared)
    assert_equal_when_killed(
        calm, keys(tiny_mixture, tmp_path / "run", backend, **shared), kills, launch, tmp_path
    )


AHEAD = 1


SOME: Kills = ((TRANSFORMERS, "generation"), ("trainer-0", "publish"))


@pytest.mark.parametrize(
    "kills",
    [
        SOME,
        # trainers train while engines generate the next iteration, so that training is no moment of
        # its own
        tuple(itertools.product([TRANSFORMERS, *WORKERS], ("publish", "generation"))),
    ],
    ids=["some", "all"],
)
# in CI test_coordinator_matrix.py resumes such runs, whose trainers are played
@pytest.mark.nightly
@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
def test_a_run_that_produces_ahead_ends_with_the_same_weights_whatever_is_killed(
    trainer: str, kills: Kills, launch: Callable[..., Launched], tiny: Path, tmp_path: Path
) -> None:
    """Groups in the buffer that are not trained yet are in the checkpoints, also if they are in
    shards with
    the trainers; an engine that comes again gets the version that trainers have left."""
    stale = {
        "trainer.backend": trainer,
        "schedule.max_staleness": AHEAD,
        "algorithm.importance_sampling": "token",
    }
    calm = launch(*keys(tiny, tmp_path / "calm", "transformers", **stale))
    calm.popen.wait(TIMEOUT_S)
    assert calm.popen.returncode == 0, calm.output
    expected = Result.read(tmp_path / "calm")

    watched = watched_when_ready(
        launch(*keys(tiny, tmp_path / "run", "transformers", buffer__shards="node", **stale)),
        AHEAD,
    )
    kill_all(watched, kills)
    watched.run.popen.wait(TIMEOUT_S)
    assert watched.run.popen.returncode == 0 and AGAIN in watched.run.output, watched.run.output
    assert "the run continues from" in watched.run.output, (
        "the kills must have met a run with checkpoints"
    )
    Result.read(tmp_path / "run").assert_equal(expected)
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["age_max"] for record in records] == [
        min(AHEAD, iteration) for iteration in range(ITERATIONS)
    ]


SKIPPING = {"schedule.max_staleness": 2, "publish.divergence": "0.02"}
CARRYING = {"schedule.max_staleness": 2, "schedule.tokens_per_update": 500}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("others", "ignore_eos"), [(SKIPPING, "true"), (CARRYING, "false")], ids=["skip", "carry"]
)
def test_what_is_skipped_or_carried_is_the_same_whatever_is_killed(
    others: dict[str, object],
    ignore_eos: str,
    launch: Callable[..., Launched],
    tiny: Path,
    tmp_path: Path,
) -> None:
    """Which versions are published follows from divergences, and what an update trains from
    lengths: the same numbers in a run that continues."""
    more = {
        **others,
        "rollout.ignore_eos": ignore_eos,
        "algorithm.importance_sampling": "token",
        "checkpoint.every": 3,
    }
    calm = launch(
        *keys(tiny, tmp_path / "calm", "transformers"), *(f"{k}={v}" for k, v in more.items())
    )
    calm.popen.wait(TIMEOUT_S)
    assert calm.popen.returncode == 0, calm.output
    run = launch(
        *keys(tiny, tmp_path / "run", "transformers"), *(f"{k}={v}" for k, v in more.items())
    )
    watched = watched_when_ready(run, ahead=1)
    kill_all(
        watched,
        ((TRANSFORMERS, "generation"), ("coordinator", "generation"), ("trainer-1", "training")),
    )
    watched.run.popen.wait(TIMEOUT_S)
    assert watched.run.popen.returncode == 0 and AGAIN in watched.run.output, watched.run.output
    Result.read(tmp_path / "run").assert_equal(Result.read(tmp_path / "calm"))
    decided = []
    names = ("publish_kl", "publish_skipped", "age_max", "tokens_response", "groups")
    for name in ("calm", "run"):
        records = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        decided.append([[record.get(name) for name in names] for record in records])
    assert decided[0] == decided[1]
    kls, skipped, ages, tokens, groups = zip(*decided[0], strict=True)
    assert max(ages) == 2, f"tokens {tokens}"
    if others is SKIPPING:
        assert (
            any(skipped) and all(kl is not None for kl in kls) and "Publishes saved:" in calm.output
        )
    else:
        assert max(groups[1:]) < 8 and min(tokens[1:-1]) >= 500, f"groups {groups}, tokens {tokens}"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "engines", "moment"),
    [
        ("delayed", 2, "training"),
        # engines that go on to the next version at once may leave no time in which trainers alone
        # are at work
        ("rolling", 3, "generation"),
    ],
)
def test_a_delayed_publish_ends_with_the_weights_of_a_blocking_one_whatever_is_killed(
    mode: str,
    engines: int,
    moment: str,
    launch: Callable[..., Launched],
    tiny: Path,
    tmp_path: Path,
) -> None:
    """Engines that die while they receive, between that and the swap, and after it; trainers with a
    version under way.
    """
    calm = launch(*keys(tiny, tmp_path / "calm", "transformers"), "schedule.max_staleness=1")
    calm.popen.wait(TIMEOUT_S)
    assert calm.popen.returncode == 0, calm.output
    delayed = {"schedule.max_staleness": 1, "publish.mode": mode, "rollout.engines": engines}
    more = [f"{key}={value}" for key, value in delayed.items()]
    watched = Watched(launch(*keys(tiny, tmp_path / "run", "transformers"), *more), ahead=1)
    last = f"engine-{engines - 1} ready"
    watched.run.wait_for(lambda: last in watched.run.output, "the engines are ready", TIMEOUT_S)
    kill_all(
        watched, ((TRANSFORMERS, "publish"), (TRANSFORMERS, "generation"), ("trainer-1", moment))
    )
    watched.run.popen.wait(TIMEOUT_S)
    assert watched.run.popen.returncode == 0 and AGAIN in watched.run.output, watched.run.output
    Result.read(tmp_path / "run").assert_equal(Result.read(tmp_path / "calm"))


@pytest.mark.nightly
def test_a_run_on_two_datasets_ends_with_the_same_weights_whatever_is_killed(
    launch: Callable[..., Launched], tiny: Path, tmp_path: Path
) -> None:
    """Whose turn it is stands in the checkpoints."""
    more = [
        f"data.train=[{{path: {tiny / 'train.jsonl'}, name: many}}, {{path: {tiny / 'test.jsonl'}, "
        f"name: few}}]",
        'reward.functions=[{name: format, pattern: "[0-4].*[0-4].*[0-4]"}]',
    ]
    calm = launch(*keys(tiny, tmp_path / "calm", "transformers"), *more)
    calm.popen.wait(TIMEOUT_S)
    assert calm.popen.returncode == 0, calm.output
    watched = watched_when_ready(launch(*keys(tiny, tmp_path / "run", "transformers"), *more))
    # each in a later version than the one before it, so that the last two meet a run with
    # checkpoints
    kills = (
        (TRANSFORMERS, "generation"),
        ("trainer-1", "training"),
        ("coordinator", "generation"),
        ("trainer-0", "training"),
    )
    kill_all(watched, kills)
    watched.run.popen.wait(TIMEOUT_S)
    assert watched.run.popen.returncode == 0 and "the run continues from" in watched.run.output, (
        watched.run.output
    )
    Result.read(tmp_path / "run").assert_equal(Result.read(tmp_path / "calm"))
    output = []
    for name in ("calm", "run"):
        records = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        output.append([record["sources"] for record in records])
    assert output[0] == output[1]
    assert all(
        sources[name]["prompts"] == 4 for sources in output[0] for name in ("many", "few")
    ), output[0]
