"""The service over HTTP: order and retries, restarts from the log, limits, hostile requests; trainers in this process."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.service.commands import StartAgain, TrainersFailed
from pa_npu.service.log import Log
from pa_npu.service.main import LoggedRegistry
from pa_npu.service.slots import Slots
from pa_npu.service.wire import ForwardBackward
from tests.helpers.models import make_model
from tests.helpers.service import (
    RANK,
    InProcess,
    ServiceOfTest,
    call_bytes,
    call_of,
    field_of,
    make_slots,
    random_datum,
    service_config,
    varint,
)

VOCAB = 64
SERVICE = {"session_timeout_s": 60.0, "checkpoint_every": 2, "slots": 2, "model_name": "tiny"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    model = make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)
    return service_config(model, tmp_path_factory.mktemp("run"), service=SERVICE)


@pytest.fixture(scope="module")
def slots(config: Config) -> Iterator[Slots]:
    made, backend = make_slots(config)
    yield made
    backend.close()


@pytest.fixture
def trainers(slots: Slots) -> InProcess:
    return InProcess(slots)


def changed(config: Config, **service: Any) -> Config:
    return config.model_copy(update={"service": config.service.model_copy(update=service)})


def body_of(model: str, seq: int, *, seed: int = 0, loss: str = "cross_entropy") -> bytes:
    random = np.random.default_rng(seed)
    data = [random_datum(random, 12, VOCAB) for _ in range(2)]
    call = call_of(data, loss)
    return call_bytes(ForwardBackward(model, seq, loss, list(call.data)))


def forward_of(model: str, seq: int) -> bytes:
    """Returns a request that changes nothing."""
    data = [random_datum(np.random.default_rng(seq), 12, VOCAB)]
    return call_bytes(ForwardBackward(model, seq, "cross_entropy", data, forward_only=True))


def step_of(model: str, seq: int, **adam: float) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-2, **adam}}


async def steps(service: ServiceOfTest, model: str, first: int, count: int) -> list[Any]:
    """Sends `count` pairs of a call and a step; returns their answers."""
    answers = []
    for number in range(count):
        seq = first + 2 * number
        answers.append(await service.call("forward_backward", body_of(model, seq, seed=seq)))
        answers.append(await service.call("optim_step", step_of(model, seq + 1)))
    return answers


async def test_a_repeated_number_is_the_same_future_and_trains_once(
    config: Config, trainers: InProcess, tmp_path: Path, slots: Slots
) -> None:
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        model = await service.model(await service.session(), "tiny", RANK)
        body = body_of(model, 1)
        first = await service.call("forward_backward", body)
        gradient = {
            key: value.clone() for key, value in slots._slots[model].parts["gradient"].items()
        }
        for _ in range(3):
            assert await service.call("forward_backward", body) == first
        for key, value in slots._slots[model].parts["gradient"].items():
            assert (value == gradient[key]).all(), "a retry must not be added again"
        status, answer = await service.post("forward_backward", body_of(model, 1, seed=9))
        assert status == 400 and "another content" in answer["detail"]
        status, answer = await service.post("optim_step", step_of(model, 1))
        assert status == 400 and "another content" in answer["detail"]


async def test_requests_wait_for_the_ones_before_them(
    config: Config, trainers: InProcess, tmp_path: Path
) -> None:
    """As the SDK sends the chunks of a call: the first one last."""
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        model = await service.model(await service.session(), "tiny", RANK)
        for seq in (3, 2):
            status, _ = await service.post("forward_backward", body_of(model, seq, seed=seq))
            assert status == 200
        await service.post("optim_step", step_of(model, 4))
        await asyncio.sleep(0.1)
        assert service.registry.models[model].next == 1, "the first is missing"
        await service.call("forward_backward", body_of(model, 1, seed=1))
        await service.call("optim_step", step_of(model, 4))
    bodies = [command.body for command in trainers.asked if hasattr(command, "body")]
    assert bodies == [body_of(model, seq, seed=seq) for seq in (1, 2, 3)]


async def test_a_gap_that_is_not_filled_is_dropped(
    config: Config, trainers: InProcess, tmp_path: Path
) -> None:
    config = changed(config, gap_timeout_s=0.2, session_timeout_s=2.0)
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        model = await service.model(await service.session(), "tiny", RANK)
        answer = await service.call("optim_step", step_of(model, 2))
        assert "did not come in time" in answer["error"]
        await service.call("forward_backward", body_of(model, 1))
        assert "grad_norm:mean" in (await service.call("optim_step", step_of(model, 2)))["metrics"]


@pytest.mark.parametrize("keep_every", [1, 2, 100])
async def test_a_restart_gives_all_answers_and_weights_to_the_bit(
    config: Config, trainers: InProcess, tmp_path: Path, slots: Slots, keep_every: int
) -> None:
    """Whatever was kept; the last call is accepted before the end and answered after it."""
    config = changed(config, checkpoint_every=keep_every)
    answers: dict[str, list[Any]] = {}
    digests = {}
    for name in ("undisturbed", "restarted"):
        directory = tmp_path / name
        trainers.forget()
        async with ServiceOfTest(config, trainers, directory, VOCAB) as service:
            model = await service.model(await service.session(), "tiny", RANK)
            answers[name] = await steps(service, model, 1, 3)
            await service.call("forward_backward", body_of(model, 7, seed=7))
            if name == "restarted":
                service._tasks[0].cancel()  # nothing is carried out any more
                await asyncio.sleep(0)
            status, promise = await service.post("optim_step", step_of(model, 8))
            assert status == 200
            if name == "undisturbed":
                answers[name].append(await service.call("optim_step", step_of(model, 8)))
        if name == "restarted":
            trainers.forget()
            async with ServiceOfTest(config, trainers, directory, VOCAB) as service:
                answer = await service.post("retrieve_future", promise)
                answers[name].append(answer[1])
                repeated = await service.call("forward_backward", body_of(model, 5, seed=5))
                assert repeated == answers[name][4], "an answer from before is still there"
        digests[name] = slots.digest(model)
    assert answers["restarted"] == answers["undisturbed"]
    assert digests["restarted"] == digests["undisturbed"]


async def test_a_log_of_another_machine_is_found_out(
    config: Config, trainers: InProcess, tmp_path: Path
) -> None:
    """Negative control of the test above: weights that differ must be seen at the restart."""
    from pa_npu.errors import InvariantViolation

    config = changed(config, checkpoint_every=100)
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        model = await service.model(await service.session(), "tiny", RANK)
        await steps(service, model, 1, 2)
    trainers.forget()
    create, moved = trainers._slots.create, {"seed": 1}

    def create_otherwise(name: str, seed: int) -> None:
        create(name, seed + moved["seed"])

    trainers._slots.create = create_otherwise  # type: ignore[method-assign]
    try:
        with pytest.raises(InvariantViolation, match="another answer than before"):
            async with ServiceOfTest(config, trainers, tmp_path, VOCAB):
                pass
    finally:
        trainers._slots.create = create  # type: ignore[method-assign]


@pytest.mark.parametrize("are_out_of_step", [False, True])
async def test_a_call_that_needs_too_much_memory_is_one_error_and_changes_nothing(
    config: Config, trainers: InProcess, tmp_path: Path, slots: Slots, are_out_of_step: bool
) -> None:
    """Ranks that are out of step are started again, and the log is replayed without the call."""
    config = changed(config, checkpoint_every=100)
    digests = {}
    for name in ("undisturbed", "disturbed"):
        trainers.forget()
        async with ServiceOfTest(config, trainers, tmp_path / name, VOCAB) as service:
            model = await service.model(await service.session(), "tiny", RANK)
            await steps(service, model, 1, 1)
            if name == "disturbed":
                trainers.too_large = body_of(model, 3, seed=9)
                trainers.failure = TrainersFailed("no memory", are_out_of_step=are_out_of_step)
                answer = await service.call("forward_backward", trainers.too_large)
                assert answer == {"error": "forward_backward: no memory", "category": "user"}
                if not are_out_of_step:
                    await steps(service, model, 4, 1)
                else:
                    with pytest.raises(StartAgain, match="no memory"):
                        await service._tasks[0]
            else:
                await service.call("forward_backward", forward_of(model, 3))
                await steps(service, model, 4, 1)
            digests[name] = slots.digest(model)
        if name == "disturbed":
            trainers.forget()
            num_asked = len(trainers.asked)
            async with ServiceOfTest(config, trainers, tmp_path / name, VOCAB) as service:
                assert await service.call("forward_backward", trainers.too_large) == answer
                if are_out_of_step:
                    await steps(service, model, 4, 1)
                digests[name] = slots.digest(model)
            bodies = [getattr(command, "body", b"") for command in trainers.asked[num_asked:]]
            assert trainers.too_large not in bodies, "it is not carried out again"
    assert digests["disturbed"] == digests["undisturbed"]


async def test_a_call_that_ends_processes_whenever_it_is_tried_is_given_up(
    config: Config, trainers: InProcess, tmp_path: Path
) -> None:
    """As one does whose trainer is killed for its need of memory, which it cannot say."""
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        model = await service.model(await service.session(), "tiny", RANK)
        await steps(service, model, 1, 1)
        trainers.too_large = body_of(model, 3)
        status, promise = await service.post("forward_backward", trainers.too_large)
        assert status == 200
        await asyncio.sleep(0.1)
        shutil.copy(tmp_path / "log", tmp_path / "stopped")
        with Log(tmp_path / "stopped") as log:
            stopped = LoggedRegistry(log, 8, is_restart=False).registry
        assert stopped.futures[promise["request_id"]].attempts == 0, "Ctrl-C is no suspicion"
    answer = None
    for attempts in (1, 2):
        trainers.forget()
        async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
            future = service.registry.futures[promise["request_id"]]
            assert future.attempts == attempts, "a log that is compacted keeps them"
            await asyncio.sleep(0.1)
            answer = future.answer
            if attempts == 1:
                assert answer is None
                continue
            await steps(service, model, 4, 1)
    assert answer is not None and "ended 2 times while they carried it out" in str(answer.error)


async def test_states_are_saved_and_loaded_and_names_are_kept(
    config: Config, trainers: InProcess, tmp_path: Path, slots: Slots
) -> None:
    config = changed(config, slots=3, saved=1)
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        session = await service.session()
        model = await service.model(session, "tiny", RANK)
        await steps(service, model, 1, 1)
        saved = await service.call(
            "save_weights", {"model_id": model, "seq_id": 3, "path": "first"}
        )
        assert saved["path"] == f"tinker://{model}/weights/first"
        digest = slots.digest(model)
        status, answer = await service.post(
            "save_weights", {"model_id": model, "seq_id": 4, "path": "first"}
        )
        assert status == 400 and "overwrite" in answer["detail"]
        await steps(service, model, 4, 1)
        assert slots.digest(model) != digest
        load = {
            "session_id": session,
            "model_seq_id": 1,
            "path": saved["path"],
            "optimizer": True,
        }
        loaded = await service.call("load_weights", load)
        assert slots.digest(loaded["model_id"]) == digest
        status, answer = await service.post(
            "load_weights", {**load, "model_seq_id": 2, "path": "tinker://x/weights/y"}
        )
        assert status == 404 and "not here" in answer["detail"]
        named = {"model_id": model, "seq_id": 6}
        status, answer = await service.post("save_weights", {**named, "path": "second"})
        assert status == 400 and "service.saved" in answer["detail"]
        await service.call("save_weights", {**named, "path": "first", "overwrite": True})
        # the cookbook's teachers are named with their base model
        teacher = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved["path"]}
        status, answer = await service.post(
            "create_sampling_session", {**teacher, "base_model": "other"}
        )
        assert status == 400 and "not served" in answer["detail"]
        status, _ = await service.post("create_sampling_session", {**teacher, "base_model": "tiny"})
        assert status == 200


async def test_snapshots_sample_with_their_version_and_old_ones_make_room(
    config: Config, trainers: InProcess, tmp_path: Path
) -> None:
    config = changed(config, snapshots=2)
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        session = await service.session()
        model = await service.model(session, "tiny", RANK)
        samplers = []
        for number in range(3):
            snapshot = {"model_id": model, "seq_id": 1 + number, "sampling_session_seq_id": number}
            answer = await service.call("save_weights_for_sampler", snapshot)
            samplers.append(answer["sampling_session_id"])
        sample = {
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 4, "seed": 5},
            "num_samples": 2,
        }
        answers = [
            await service.call("asample", {**sample, "sampling_session_id": sampler})
            for sampler in samplers[1:]
        ]
        assert answers[0] != answers[1]
        assert len(set(service.sampler.versions)) == 2 and min(service.sampler.versions) > 0
        again = await service.call("asample", {**sample, "sampling_session_id": samplers[2]})
        assert again == answers[1] and len(service.sampler.versions) == 2, "asked once"
        status, gone = await service.post("asample", {**sample, "sampling_session_id": samplers[0]})
        assert status == 404 and "newer snapshots" in gone["detail"]


async def test_strict_refuses_samples_of_other_weights(
    config: Config, trainers: InProcess, tmp_path: Path
) -> None:
    config = changed(config, strict=True)
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        model = await service.model(await service.session(), "tiny", RANK)
        await service.call("forward_backward", body_of(model, 1))  # supervised data has none
        await service.call("optim_step", step_of(model, 2))

        async def sampled(seq: int) -> str:
            """Returns the id of a sample by a snapshot that is request `seq`."""
            snapshot = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
            answer = await service.call("save_weights_for_sampler", snapshot)
            sample = {
                "sampling_session_id": answer["sampling_session_id"],
                "seq_id": 0,
                "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
                "sampling_params": {"max_tokens": 4},
            }
            status, promise = await service.post("asample", sample)
            assert status == 200
            return str(promise["sample_sequence_ids"][0])

        sequence = await sampled(3)
        random = np.random.default_rng(0)
        datum = random_datum(random, 6, VOCAB, sampled=True)

        def body(seq: int, source: str | None) -> bytes:
            from tests.helpers.service import datum_bytes

            content = datum_bytes(datum)
            if source is not None:
                content += field_of(4, field_of(2, field_of(1, source.encode()) + field_of(3, 6)))
            fields = field_of(1, model.encode()) + field_of(2, seq) + field_of(3, content)
            return fields + field_of(4, b"importance_sampling")

        for source in (None, "s-1:sample:0/0#0"):
            status, answer = await service.post("forward_backward", body(4, source))
            assert status == 400, answer
        await service.call("forward_backward", body(4, sequence))
        await service.call("optim_step", step_of(model, 5))
        status, answer = await service.post("forward_backward", body(6, sequence))
        assert status == 400 and "sample again" in answer["detail"]
        sequence = await sampled(6)
        service._tasks[0].cancel()  # what is accepted waits from here on
        assert (await service.post("save_weights", {"model_id": model, "seq_id": 7}))[0] == 200
        status, answer = await service.post("forward_backward", body(8, sequence))
        assert status == 200, f"a save that waits changes no weights: {answer}"
        await service.post("optim_step", step_of(model, 9))
        status, answer = await service.post("forward_backward", body(10, sequence))
        assert status == 400 and "sample again" in answer["detail"]


async def test_a_client_that_vanishes_frees_its_slot(
    config: Config, trainers: InProcess, tmp_path: Path, slots: Slots
) -> None:
    config = changed(config, session_timeout_s=0.6, slots=1)
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        gone = await service.session()
        model = await service.model(gone, "tiny", RANK)
        alive = await service.session()
        taken = {
            "session_id": alive,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": RANK, "train_unembed": False},
        }
        status, answer = await service.post("create_model", taken)
        assert status == 429 and "slots are taken" in answer["detail"]
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert (await service.post("session_heartbeat", {"session_id": alive}))[0] == 200
            if model not in service.registry.models:
                break
        assert model not in service.registry.models and model not in slots._slots
        assert (await service.call("create_model", taken))["model_id"].startswith(alive)
        assert (await service.post("session_heartbeat", {"session_id": gone}))[0] == 410


def hostile(model: str, session: str) -> list[tuple[str, Any]]:
    """Returns a hundred requests and more that no server should serve."""
    fine = {"sampling_session_id": "x", "seq_id": 0, "sampling_params": {"max_tokens": 4}}
    prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
    random = np.random.default_rng(0)
    datum = random_datum(random, 8, VOCAB)
    rl = random_datum(random, 8, VOCAB, sampled=True)

    def call(loss: str, data: list[Any], config: dict[str, float] | None = None) -> bytes:
        return call_bytes(ForwardBackward(model, 1, loss, data, dict(config or {})))

    def altered(**inputs: Any) -> Any:
        return type(rl)(rl.tokens, {**rl.inputs, **inputs})

    requests: list[tuple[str, Any]] = []
    for loss in ("", "CROSS_ENTROPY", "mse", "stable_reinforce", "custom", "x" * 5000, "../etc"):
        requests.append(("forward_backward", call(loss, [datum])))
    for key in ("clip", "beta", "clip_low", "kl_coeff", ""):
        requests.append(("forward_backward", call("ppo", [rl], {key: 0.1})))
    for value in (float("nan"), float("inf"), -float("inf")):
        requests.append(("forward_backward", call("ppo", [rl], {"clip_low_threshold": value})))
    requests.append(("forward_backward", call("ppo", [rl], {"clip_low_threshold": 9.0})))
    requests.append(("forward_backward", call("dro", [rl])))
    requests.append(("forward_backward", call("gspo", [rl])))
    for bad in (
        altered(weights=np.ones(8, np.float32)),
        altered(mask=np.ones(8, np.float32)),
        altered(advantages=np.full(8, np.nan, np.float32)),
        altered(logprobs=np.full(8, np.inf, np.float32)),
        altered(advantages=np.ones(7, np.float32)),
        altered(advantages=np.ones((8, 2), np.float32)),
        altered(advantages=np.ones(8, np.int64)),
        altered(target_tokens=np.full(8, VOCAB)),
        altered(target_tokens=np.full(8, -1)),
        altered(target_tokens=np.zeros(7, np.int64)),
        altered(target_tokens=np.zeros((8, 2), np.int64)),
        altered(target_tokens=np.zeros(8, np.float32)),
        type(rl)(np.full(8, VOCAB, np.int32), rl.inputs),
        type(rl)(np.full(8, -5, np.int32), rl.inputs),
        type(rl)(np.zeros(0, np.int32), rl.inputs),
        type(rl)(np.zeros(2**15, np.int32), {"target_tokens": np.zeros(2**15, np.int64)}),
        type(rl)(rl.tokens, {}),
        type(rl)(rl.tokens, {"target_tokens": rl.inputs["target_tokens"]}),
    ):
        requests.append(("forward_backward", call("importance_sampling", [bad])))
    whole = call("cross_entropy", [datum])
    for place in range(1, len(whole), max(1, len(whole) // 20)):
        requests.append(("forward_backward", whole[:place]))
    requests += [
        ("forward_backward", b""),
        ("forward_backward", b"\xff" * 1000),
        ("forward_backward", call_bytes(ForwardBackward("s-0:train:0", 1, "ppo", [rl]))),
        ("forward_backward", call_bytes(ForwardBackward(model, 10**6, "cross_entropy", [datum]))),
        ("forward_backward", whole + varint(3 << 3 | 2) + varint(2**60)),
        ("forward_backward", whole + field_of(3, b"\x0a\x02")),
    ]
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10**5, b'{"a":1}', b'"' * 1000):
        for route in ("optim_step", "create_model", "asample"):
            requests.append((route, body))
    for adam in (
        {"learning_rate": -1.0},
        {"learning_rate": "0.1"},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": -1.0},
        {"amsgrad": True},
        {"weight_decay": -0.5},
    ):
        requests.append(("optim_step", {"model_id": model, "seq_id": 1, "adam_params": adam}))
    requests += [
        ("optim_step", {"model_id": model, "seq_id": -1, "adam_params": {}}),
        ("optim_step", {"model_id": model, "seq_id": 1, "optimizer_params": {"type": "dimuon"}}),
        ("optim_step", {"model_id": "nobody", "seq_id": 1, "adam_params": {}}),
        ("save_weights", {"model_id": model, "seq_id": 1, "path": "../../etc/passwd"}),
        ("save_weights", {"model_id": model, "seq_id": 1, "path": "a/b"}),
        ("save_weights", {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": -4}),
        ("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "kind": "inflight"}),
        (
            "load_weights",
            {"model_id": model, "seq_id": 1, "path": "/etc/passwd", "optimizer": True},
        ),
        ("load_weights", {"path": "tinker://a/b", "optimizer": False}),
        ("create_session", {"sdk_version": "0.1.0", "tags": [], "user_metadata": {}}),
        ("client/config", {"sdk_version": "99.0"}),
        ("retrieve_future", {"request_id": "nothing"}),
        ("get_info", {"model_id": "nobody"}),
        ("asample", {**fine, "prompt": prompt}),
        ("asample", {**fine, "prompt": {"chunks": [{"type": "image"}]}}),
        ("asample", {**fine, "prompt": prompt, "num_samples": 10**9}),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0}),
        (
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "base_model": "other"},
        ),
        ("create_custom_loss", {}),
        ("../../etc/passwd", {}),
    ]
    for rank in (0, 1, 8, 4096, -3, 2**40):
        body = {
            "session_id": session,
            "model_seq_id": 7,
            "base_model": "tiny",
            "lora_config": {"rank": rank},
        }
        requests.append(("create_model", body))
    return requests


async def test_a_hundred_hostile_requests_are_refused_in_a_line(
    config: Config, trainers: InProcess, tmp_path: Path, slots: Slots
) -> None:
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        session = await service.session()
        model = await service.model(session, "tiny", RANK)
        asked, log_bytes = len(trainers.asked), service.log.num_bytes
        requests = hostile(model, session)
        assert len(requests) >= 100
        for route, body in requests:
            status, answer = await service.post(route, body)
            assert 400 <= status < 500, (route, body, status, answer)
            assert answer["detail"] and "\n" not in answer["detail"], (route, answer)
        status, _ = await service.post("create_session", b"x", **{"X-API-Key": "tml-wrong"})
        assert status == 401
        status, _ = await service.post("forward_backward", b"x" * (65 * 2**20))
        assert status == 413
        assert len(trainers.asked) == asked, "none of them came to the trainers"
        assert service.log.num_bytes == log_bytes, "none of them is in the log"
        await steps(service, model, 1, 1)


async def test_pending_requests_are_bounded(
    config: Config, trainers: InProcess, tmp_path: Path
) -> None:
    config = changed(config, pending=4)
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        model = await service.model(await service.session(), "tiny", RANK)
        statuses = []
        for seq in range(2, 9):  # the first one is missing: all wait
            status, _ = await service.post("forward_backward", body_of(model, seq, seed=seq))
            statuses.append(status)
        assert statuses[:3] == [200] * 3 and set(statuses[3:]) == {429}


async def test_a_log_that_is_compacted_gives_the_same_service(
    config: Config, trainers: InProcess, tmp_path: Path, slots: Slots
) -> None:
    config = changed(config, answers=2, checkpoint_every=1)
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        ended = await service.session()
        await steps(service, await service.model(ended, "tiny", RANK), 1, 2)
        await service.service.end_session(ended)
        model = await service.model(await service.session(), "tiny", RANK)
        await steps(service, model, 1, 4)
        digest, size = slots.digest(model), service.log.num_bytes
    trainers.forget()
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        assert service.log.num_bytes < size / 2
        assert slots.digest(model) == digest
        await steps(service, model, 9, 1)
        digest = slots.digest(model)
    trainers.forget()
    async with ServiceOfTest(config, trainers, tmp_path, VOCAB) as service:
        assert slots.digest(model) == digest
