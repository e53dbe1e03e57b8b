"""The npu platform's device functions over the stub runtime."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path

import pytest
import torch
import torch_npu

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


def test_profile_asks_torch_npu_for_host_and_device_activities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub runtime cannot profile: the recorder is replaced, its arguments and the handler are torch_npu's own."""
    asked = {}

    signature = inspect.signature(torch_npu.profiler.profile)
    monkeypatch.setattr(torch_npu.profiler, "profile", lambda **given: asked.update(signature.bind(**given).arguments))
    platforms.get("npu").profile(tmp_path / "profile", "iteration_000001_rank0")
    activity = torch_npu.profiler.ProfilerActivity
    assert set(asked["activities"]) == {activity.CPU, activity.NPU} and callable(asked["on_trace_ready"])
