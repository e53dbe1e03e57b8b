"""`pa-npu view RUN [RUN ...]`: a page over a run directory, served until Ctrl-C or written as one HTML file.

pa-npu view runs/grpo_tiny                          serve it, live, at http://127.0.0.1:PORT/
pa-npu view runs/b runs/a                           show b, and how its configuration and curves differ from a's
pa-npu view runs/grpo_tiny --export page.html       one file that needs no server
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pa_npu.errors import UserError
from pa_npu.launcher.arguments import existing_path, new_path
from pa_npu.launcher.subcommands import refuse
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import ViewServer, export


def view_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = __doc__
    parser.add_argument(
        "runs",
        nargs="+",
        type=existing_path,
        metavar="RUN",
        help="run directory; further ones are compared with the first",
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port on loopback; default: a free one")
    parser.add_argument("--export", type=new_path, metavar="FILE", help="write one HTML file instead of serving")


def view(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Serves until interrupted, or exports. Raises UserError."""
    refuse(rest)
    runs = [RunDirectory(directory) for directory in options.runs]
    if options.export:
        note = export(runs, Path(options.export))
        print(f"wrote {options.export}{note}")
        return 0
    if not 0 <= options.port < 2**16:
        raise UserError(f"--port {options.port}: must be 0 to 65535")
    with ViewServer(runs, options.port) as server:
        print(f"{runs[0].name}: {server.url} (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
