"""`pa-npu view RUN [RUN ...]`: a page over a run, or over a folder of runs, served until Ctrl-C or written as one HTML file.

pa-npu view runs/grpo_tiny                          serve it, live, at http://127.0.0.1:PORT/
pa-npu view runs/b runs/a                           show b, with a's curves, answers and differing keys beside its own
pa-npu view runs                                    a table of all runs in the folder, to sort, open and compare
pa-npu view runs/grpo_tiny --export page.html       one file that needs no server
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pa_npu.errors import UserError
from pa_npu.launcher.arguments import existing_path, new_path
from pa_npu.launcher.subcommands import refuse
from pa_npu.viewer.run import RunDirectory, is_run_directory
from pa_npu.viewer.server import MAX_COMPARED, ViewServer, export, export_table
from pa_npu.viewer.shelf import Shelf


def view_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = __doc__
    parser.add_argument(
        "runs",
        nargs="+",
        type=existing_path,
        metavar="RUN",
        help="run directory, with further ones to compare it with; or one folder of runs",
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="port on loopback; default: a free one"
    )
    parser.add_argument(
        "--export", type=new_path, metavar="FILE", help="write one HTML file instead of serving"
    )


def view(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Serves until interrupted, or exports. Raises UserError."""
    refuse(rest)
    if not 0 <= options.port < 2**16:
        raise UserError(f"--port {options.port}: must be 0 to 65535")
    shown = _shown(options.runs)
    if options.export:
        print(f"wrote {options.export}{_export(shown, Path(options.export))}")
        return 0
    name = shown.name if isinstance(shown, Shelf) else shown[0].name
    with ViewServer(shown, options.port) as server:
        print(f"{name}: {server.url} (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _shown(directories: Sequence[str]) -> Shelf | list[RunDirectory]:
    """Returns the runs; or the folder, where one directory is given that holds runs and is none
    itself.
    """
    if len(directories) > 1 + MAX_COMPARED:
        raise UserError(
            f"view: {len(directories)} runs are more than {1 + MAX_COMPARED} to compare; give the "
            "folder that they are in"
        )
    first = Path(directories[0])
    if len(directories) == 1 and first.is_dir() and not is_run_directory(first):
        return Shelf(first)
    return [RunDirectory(directory) for directory in directories]


def _export(shown: Shelf | list[RunDirectory], file: Path) -> str:
    if isinstance(shown, Shelf):
        export_table(shown, file)
        return ""
    return export(shown, file)
