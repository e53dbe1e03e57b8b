"""tools/bench_peers.py: what becomes of runs, honesty about those that failed, and the attention that stands in on a CPU."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pa_npu.launcher.placement import free_ports
from tools import bench_peers
from tools.bench_peers import SHAPES, SYSTEMS, WARMUP, PeerError, finish, read_ours, read_trl
from tools.peers.cpu_stand_ins import attend, receive, send, trainer_end, worker_end
from tools.peers.rewards import of_completions, vowel_share
from tools.peers.table import Measured, draw, render, row_of, rows_of
from tools.processes import started

TITLES = {name: shape.title for name, shape in SHAPES.items()}


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


def test_a_round_that_failed_is_named_and_does_not_count() -> None:
    runs = [
        Measured("long", "trl-async", 0, [2.0], [128], 1.5, 3),
        Measured("long", "trl-async", 1, problem="ended with 1: x"),
    ]
    row = row_of(runs, prompt_tokens=0)
    assert (row.rounds, row.tokens_per_s, row.problem) == (1, 64.0, "ended with 1: x")


def test_the_table_has_ratios_ages_and_a_row_for_what_did_not_run(tmp_path: Path) -> None:
    runs = [
        Measured("short", "periodic", 0, [1.0], [1000], 0.0, 0, 2e-7),
        Measured("short", "trl-server", 0, [4.0], [1000], 0.0, 0),
        Measured("short", "trl-colocate", 0, problem="not done after 300 s; its last line: loading"),
        Measured("long", "trl-async", 0, [2.0], [500], 2.5, 4),
    ]
    rows = rows_of(runs, list(SHAPES), list(SYSTEMS), {name: 0 for name in SHAPES})
    text = render(rows, TITLES, SYSTEMS, "trl-server")
    assert text.index("### prompts of 128") < text.index("### prompts of 16")
    assert "| this, periodic | 1.00 | 1.00, 1.00 | 1,000 | 4.00x | 1,000 | 0.00, 0 | 2.0e-07 |" in text
    assert "| TRL GRPOTrainer, vLLM server | 4.00 | 4.00, 4.00 | 250 | 1.00x |" in text
    assert (
        "| TRL AsyncGRPOTrainer | 2.00 | 2.00, 2.00 | 250 |  | 500 | 2.50, 4 |  |" in text
    )  # no reference in its shape
    assert "| TRL GRPOTrainer, colocated | did not run |" in text
    assert "TRL GRPOTrainer, colocated, no run: not done after 300 s; its last line: loading" in text
    assert text.count(SYSTEMS["trl-async"].corrections) == 1
    assert "this, synchronous" not in text, "what nobody asked for has no row"
    assert {path.suffix for path in draw(rows, TITLES, SYSTEMS, tmp_path / "peers")} == {".png", ".svg"}


def step(at_s: float, **numbers: float) -> dict[str, float]:
    return {"seconds": at_s, "completions/mean_length": 10.0, **numbers}


def test_steps_of_trl_are_timed_from_the_end_of_the_warm_up() -> None:
    warm = [step(float(number)) for number in range(WARMUP - 1)]
    run = read_trl("long", "trl-server", 1, [*warm, step(9.0), step(12.0), step(16.0)])
    assert (run.round, list(run.seconds), list(run.response_tokens)) == (1, [3.0, 4.0], [1280.0, 1280.0])
    assert (run.age_mean, run.age_max) == (0.0, 0)


def test_the_asynchronous_trainer_says_what_it_trained_and_how_old_that_was() -> None:
    said = {"batch/trained_tokens_per_step": 777.0, "sample/staleness_mean": 1.5}
    steps = [step(float(i), **said, **{"sample/staleness_max": float(i)}) for i in range(WARMUP + 2)]
    run = read_trl("free", "trl-async", 0, steps)
    assert (list(run.response_tokens), run.age_mean, run.age_max) == ([777.0, 777.0], 1.5, WARMUP + 1)


def test_iterations_of_this_system_leave_out_warm_up_and_what_produces_nothing() -> None:
    records = [
        {"iteration_s": float(i - WARMUP), "tokens_response": 10 * i, "age_mean": 1.0, "age_max": 1}
        for i in range(WARMUP + 3)
    ]
    assert list(read_ours("long", "periodic", 0, records).seconds) == [0.0, 1.0, 2.0]
    stale = read_ours("long", "stale", 0, records)
    assert (list(stale.seconds), stale.age_mean, stale.age_max) == ([0.0, 1.0], 1.0, 1)


@pytest.mark.parametrize("read", [read_ours, read_trl])
def test_a_run_that_ended_in_the_warm_up_is_no_result(read) -> None:
    with pytest.raises(PeerError, match="no more than the warm-up"):
        read("long", "sync", 0, [{"seconds": 1.0}] * WARMUP)


def test_a_process_that_fails_or_hangs_is_a_reason_and_nothing_is_left(tmp_path: Path, monkeypatch) -> None:
    log = tmp_path / "log"
    with (
        started([sys.executable, "-c", "raise ValueError('no such thing')"], log) as process,
        pytest.raises(PeerError, match="ended with 1: ValueError: no such thing"),
    ):
        finish(process, log)
    monkeypatch.setattr(bench_peers, "RUN_S", 0.2)
    with (
        started([sys.executable, "-c", "import time; print('busy', flush=True); time.sleep(60)"], log) as process,
        pytest.raises(PeerError, match=r"not done after 0\.2 s"),
    ):
        finish(process, log)
    assert process.poll() is not None


def test_runs_are_kept_between_invocations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "runs.json"
    bench_peers.save_runs(kept, [Measured("long", "sync", 0, [2.0], [128], 0.0, 0)])
    assert bench_peers.main(["--shapes", "", "--json", str(kept), "--markdown", str(tmp_path / "table.md")]) == 0
    assert "| this, synchronous | 2.00 |" in capsys.readouterr().out
    assert "| this, synchronous | 2.00 |" in (tmp_path / "table.md").read_text()
    assert len(json.loads(kept.read_text())) == 1


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
