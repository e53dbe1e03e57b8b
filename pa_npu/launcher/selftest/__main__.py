"""A part's own process: python -m pa_npu.launcher.selftest FUNCTION BENCH ANSWER."""

import sys

from pa_npu.launcher.selftest.parts import run_function
from pa_npu.weight_transfer.transport import run_and_exit

run_and_exit(lambda: run_function(*sys.argv[1:4]))
