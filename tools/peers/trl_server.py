"""vLLM's own server with weight transfer on a CPU.

python trl_server.py CORE ARGUMENTS...      # arguments as `vllm serve` takes them
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.peers import cpu_stand_ins

cpu_stand_ins.use_in_engine()  # also where a process of the engine imports this file

if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})
    sys.argv = ["vllm", *sys.argv[2:]]
    import runpy

    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
