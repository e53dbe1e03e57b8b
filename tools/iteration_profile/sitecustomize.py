"""Samples a process from inside: which code its processor time goes to, a line a second.

tools/profile_iteration.py puts this on PYTHONPATH. Python imports a module of this name when it
starts, so that every process of a run is sampled and none is changed. A thread looks at the stacks
of all others every 10 ms and adds the processor time that each has taken since to the cause of its
innermost known frame. PA_NPU_PROFILE names the folder of the files; without it nothing happens.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType

VARIABLE = "PA_NPU_PROFILE"
EVERY_S = 0.01
WRITTEN_EVERY_S = 1.0

# A part of a file's path, the names of functions there (none: all), and the cause. The innermost
# frame that is in the table decides.
CAUSES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("vllm/v1/sample/", (), "sampling"),
    ("vllm/v1/core/", (), "scheduling"),
    ("vllm/v1/serial_utils", (), "messages in the engine"),
    ("/zmq/", (), "messages in the engine"),
    ("vllm/v1/engine/core_client", (), "messages in the engine"),
    ("vllm/v1/engine/detokenizer", (), "HTTP, JSON and text"),
    ("vllm/v1/engine/logprobs", (), "HTTP, JSON and text"),
    ("vllm/v1/engine/output_processor", (), "HTTP, JSON and text"),
    ("vllm/entrypoints/", (), "HTTP, JSON and text"),
    ("vllm/v1/worker/", ("_update_states", "_prepare_inputs"), "decode, preparing"),
    ("vllm/v1/worker/", (), "decode"),
    ("vllm/model_executor/", (), "decode"),
    ("pa_npu/weight_transfer/", (), "publish"),
    ("pa_npu/publish/", (), "publish"),
    ("uvicorn/", (), "HTTP, JSON and text"),
    ("starlette/", (), "HTTP, JSON and text"),
    ("fastapi/", (), "HTTP, JSON and text"),
    ("pydantic/", (), "HTTP, JSON and text"),
    ("httpx/", (), "HTTP, JSON and text"),
    ("httpcore/", (), "HTTP, JSON and text"),
    ("aiohttp/", (), "HTTP, JSON and text"),
    ("pa_npu/engines/", (), "HTTP, JSON and text"),
    ("torch/autograd/graph.py", ("_engine_run_backward",), "backward"),
    ("torch/optim/", (), "step"),
    ("megatron/core/optimizer/", (), "step"),
    ("pa_npu/trainer/step_", (), "checks of the step"),
    ("pa_npu/trainer/invariants", (), "checks of the step"),
    ("pa_npu/trainer/loss_checks", (), "checks of the step"),
    ("pa_npu/algorithm/", (), "loss"),
    ("pa_npu/attention/", (), "forward"),
    ("megatron/core/transformer/", (), "forward"),
    ("megatron/core/models/", (), "forward"),
    ("torch/nn/modules/", (), "forward"),
    ("transformers/models/", (), "forward"),
    ("pa_npu/samples/microbatch", (), "packing"),
    ("pa_npu/samples/", ("_parse", "from_bytes", "to_bytes", "pack", "cut"), "packing"),
    ("pa_npu/samples/", (), "dispatch"),
    ("pa_npu/coordinator/", (), "dispatch"),
    ("pa_npu/dispatch/", (), "dispatch"),
    ("pa_npu/planning/", (), "schedule"),
    ("pa_npu/rewards/", (), "rewards"),
    ("pa_npu/telemetry/", (), "records"),
    ("tensorboard/", (), "records"),
    ("pa_npu/checkpoints/", (), "checkpoint"),
    ("pa_npu/control/", (), "waiting"),
    ("selectors.py", ("select",), "waiting"),
    ("threading.py", ("wait", "_wait_for_tstate_lock"), "waiting"),
    ("asyncio/", (), "event loop"),
)
OTHER = "other Python"
NATIVE = "threads without Python"


def cause_of(frame: FrameType | None) -> str:
    """Returns the cause of the innermost frame that the table knows."""
    while frame is not None:
        path = frame.f_code.co_filename
        name = frame.f_code.co_name
        for part, names, cause in CAUSES:
            if part in path and (not names or name in names):
                return cause
        frame = frame.f_back
    return OTHER


def thread_seconds() -> dict[int, float]:
    """Returns the processor seconds of each thread of this process, by native id."""
    seconds = {}
    for task in os.listdir("/proc/self/task"):
        try:
            text = Path(f"/proc/self/task/{task}/schedstat").read_text(encoding="ascii")
        except OSError:
            continue  # it has ended
        seconds[int(task)] = int(text.split()[0]) / 1e9
    return seconds


def sample(folder: Path) -> None:
    """Samples until the process ends."""
    own_thread = threading.get_native_id()
    before = thread_seconds()
    causes: dict[str, float] = defaultdict(float)
    written_s = time.time()
    with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"command": sys.orig_argv, "pid": os.getpid()}) + "\n")
        while True:
            time.sleep(EVERY_S)
            frames = sys._current_frames()
            threads = threading.enumerate()
            natives = {thread.native_id: frames.get(thread.ident or 0) for thread in threads}
            now_seconds = thread_seconds()
            for native_id, seconds in now_seconds.items():
                taken_s = seconds - before.get(native_id, 0.0)
                if native_id == own_thread or taken_s <= 0:
                    continue
                cause = NATIVE
                if native_id in natives:
                    cause = cause_of(natives[native_id])
                causes[cause] += taken_s
            before = now_seconds
            if time.time() - written_s >= WRITTEN_EVERY_S:
                written_s = time.time()
                file.write(json.dumps({"time": written_s, "causes": causes}) + "\n")
                file.flush()
                causes.clear()


def begin() -> None:
    """Starts the thread, in this process and in those that it forks."""
    folder = Path(os.environ[VARIABLE])
    thread = threading.Thread(target=sample, args=(folder,), name="profile", daemon=True)
    thread.start()


if VARIABLE in os.environ:
    begin()
    os.register_at_fork(after_in_child=begin)
