"""A part's own process: python -m pa_npu.launcher.selftest FUNCTION BENCH ANSWER."""

import sys

from pa_npu.launcher.selftest.parts import run_function

sys.exit(run_function(*sys.argv[1:4]))
