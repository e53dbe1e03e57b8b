"""Runs the command line, for `python -m pa_npu.launcher`."""

from __future__ import annotations

import sys

from pa_npu.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
