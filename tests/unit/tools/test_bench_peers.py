"""tools/bench_peers.py: the attention and transport that stand in on a CPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch

from pa_npu.launcher.placement import free_ports
from tools.peers.cpu_stand_ins import attend, receive, send, trainer_end, worker_end


def test_attention_over_packed_segments_is_that_of_each_segment_alone() -> None:
    torch.manual_seed(0)
    # a prompt, two responses of equal length, another one
    lengths = [(5, 5), (3, 8), (3, 8), (2, 7)]
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
        expected = torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v
        )
        torch.testing.assert_close(out[ends_q[i] : ends_q[i + 1]], expected, msg=f"segment {i}")


def test_weights_arrive_over_gloo_as_they_were_sent() -> None:
    sent = {
        "a": torch.randn(3, 5),
        "b": torch.arange(4, dtype=torch.int64),
        "c": torch.randn(7).bfloat16(),
    }
    info = {
        "master_address": "127.0.0.1",
        "master_port": free_ports("127.0.0.1", 1)[0],
        "world_size": 2,
    }
    arrived: dict[str, torch.Tensor] = {}

    def engine() -> None:
        group = worker_end(SimpleNamespace(**info, rank_offset=1), SimpleNamespace(rank=0))
        announced = ((name, (list(tensor.shape), tensor.dtype)) for name, tensor in sent.items())
        receive(announced, group, 0, arrived.update)

    another = threading.Thread(target=engine, daemon=True)
    another.start()
    send(sent.items(), trainer_end(info), 0, lambda item: item[1])
    another.join(60)
    assert list(arrived) == list(sent)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in sent.items())
