"""`pa-npu report` for a checkout that is not installed: python tools/tpspd_report.py RUN [RUN ...] [options]."""

import sys

from pa_npu.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
