"""What `python -m pa_npu.launcher` runs: the command line."""

from __future__ import annotations

import sys

from pa_npu.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
