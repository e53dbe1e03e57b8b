"""The npu platform's device functions over the stub runtime."""

from __future__ import annotations

import threading

import torch

from pa_npu import platform as platforms


def test_side_stream_of_a_thread_is_not_the_training_stream() -> None:
    platform = platforms.get("npu")
    platform.set_device(0)
    npu = torch.npu  # type: ignore[attr-defined]
    seen = []

    def background() -> None:
        with platform.side_stream():
            seen.append(npu.current_stream())
        seen.append(npu.current_stream())

    thread = threading.Thread(target=background, name="background")
    thread.start()
    thread.join(10)
    inside, after = seen
    assert inside != npu.default_stream() and inside != npu.current_stream()
    assert after == npu.default_stream()
