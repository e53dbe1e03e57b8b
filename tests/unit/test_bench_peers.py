"""tools/bench_peers.py: figures of runs, and the attention and transport that stand in on a CPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from pa_npu.launcher.placement import free_ports
from tools.bench_peers import WARMUP, read_ours, read_trl
from tools.peers.cpu_stand_ins import attend, receive, send, trainer_end, worker_end
from tools.peers.rewards import of_completions, vowel_share
from tools.peers.table import Measured, row_of


def test_a_row_divides_all_tokens_by_all_seconds_and_keeps_the_spread_of_rounds() -> None:
    runs = [
        Measured("long", "periodic", 0, [2.0, 4.0], [100, 200], 0.0, 0, 1e-7),
        Measured("long", "periodic", 1, [5.0, 5.0], [300, 400], 0.0, 0, 3e-7),
    ]
    row = row_of(runs, prompt_tokens=1000)
    assert (row.iteration_s, row.range_s, row.rounds) == (4.0, (3.0, 5.0), 2)
    assert row.tokens_per_s == pytest.approx((4 * 1000 + 1000) / 16)
    assert row.response_tokens == 250
    assert row.logprob_difference == pytest.approx(2e-7)


def step(at_s: float, **numbers: float) -> dict[str, float]:
    return {"seconds": at_s, "completions/mean_length": 10.0, **numbers}


def test_steps_of_trl_are_timed_from_the_end_of_the_warm_up() -> None:
    warm = [step(float(number)) for number in range(WARMUP - 1)]
    run = read_trl("long", "trl-server", 1, [*warm, step(9.0), step(12.0), step(16.0)])
    assert (run.round, list(run.seconds), list(run.response_tokens)) == (1, [3.0, 4.0], [1280.0, 1280.0])
    assert (run.age_mean, run.age_max) == (0.0, 0)


def test_iterations_of_this_system_leave_out_warm_up_and_what_produces_nothing() -> None:
    records = [
        {"iteration_s": float(i - WARMUP), "tokens_response": 10 * i, "age_mean": 1.0, "age_max": 1}
        for i in range(WARMUP + 3)
    ]
    assert list(read_ours("long", "periodic", 0, records).seconds) == [0.0, 1.0, 2.0]
    stale = read_ours("long", "stale", 0, records)
    assert (list(stale.seconds), stale.age_mean, stale.age_max) == ([0.0, 1.0], 1.0, 1)


def test_attention_over_packed_segments_is_that_of_each_segment_alone() -> None:
    torch.manual_seed(0)
    lengths = [(5, 5), (3, 8), (3, 8), (2, 7)]  # a prompt, two responses of equal length, another one
    heads, kv_heads, size = 4, 2, 8
    query = torch.randn(sum(q for q, _ in lengths), heads, size)
    key, value = (torch.randn(sum(k for _, k in lengths), kv_heads, size) for _ in range(2))
    ends_q, ends_k = (torch.tensor([0, *row]).cumsum(0) for row in zip(*lengths, strict=True))
    out = attend(query, key, value, ends_q, ends_k, 5, 8, softmax_scale=0.3)
    for i, (rows, columns) in enumerate(lengths):
        q = query[ends_q[i] : ends_q[i + 1]]
        k, v = (x[ends_k[i] : ends_k[i + 1]].repeat_interleave(2, dim=1) for x in (key, value))
        scores = 0.3 * torch.einsum("qhd,khd->hqk", q, k)
        seen = torch.arange(columns)[None] <= torch.arange(columns - rows, columns)[:, None]
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
        torch.testing.assert_close(out[ends_q[i] : ends_q[i + 1]], expected, msg=f"segment {i}")


def test_weights_arrive_over_gloo_as_they_were_sent() -> None:
    sent = {"a": torch.randn(3, 5), "b": torch.arange(4, dtype=torch.int64), "c": torch.randn(7).bfloat16()}
    info = {"master_address": "127.0.0.1", "master_port": free_ports("127.0.0.1", 1)[0], "world_size": 2}
    arrived: dict[str, torch.Tensor] = {}

    def engine() -> None:
        group = worker_end(SimpleNamespace(**info, rank_offset=1), SimpleNamespace(rank=0))
        announced = ((name, (list(tensor.shape), tensor.dtype)) for name, tensor in sent.items())
        receive(announced, group, 0, arrived.update)

    other = threading.Thread(target=engine, daemon=True)
    other.start()
    send(sent.items(), trainer_end(info), 0, lambda item: item[1])
    other.join(60)
    assert list(arrived) == list(sent)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in sent.items())


def test_the_reward_is_the_same_for_both_systems() -> None:
    assert vowel_share("abe!") == pytest.approx(2 / 3)
    assert of_completions([[{"role": "assistant", "content": "abe!"}], [{"role": "assistant", "content": ""}]]) == [
        pytest.approx(2 / 3),
        0.0,
    ]
