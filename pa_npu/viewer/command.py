"""`pa-npu view RUN [RUN ...]`: a page over a run directory, served until Ctrl-C or written as one HTML file.

pa-npu view runs/grpo_tiny                          serve it, live, at http://127.0.0.1:PORT/
pa-npu view runs/b runs/a                           show b, and how its configuration and curves differ from a's
pa-npu view runs/grpo_tiny --export page.html       one file that needs no server
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pa_npu.errors import UserError
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import ViewServer, answer, page

LARGEST_BYTES = 48 << 20
EXPORTED_LOG_BYTES = 32 << 10


def export(runs: Sequence[RunDirectory], file: Path) -> str:
    """Writes the file; returns what was left out for its size, in words, or nothing. The newest iterations come first."""
    data: dict[str, Any] = {"run": answer(runs, "run"), "compare": answer(runs, "compare")}
    for process in data["run"]["processes"]:
        if process["log"]:
            data[f"log/{process['log']}"] = {
                "name": process["log"],
                "text": runs[0].log(process["log"], EXPORTED_LOG_BYTES),
            }
    room = LARGEST_BYTES - len(json.dumps(data, default=str))
    left_out = {}
    for kind in ("timeline", "samples"):
        wanted = data["run"][f"{kind.removesuffix('s')}_iterations"]
        kept = []
        for iteration in reversed(wanted):
            name = f"{kind}/{iteration}"
            found = answer(runs, name)
            room -= len(json.dumps(found, default=str))
            if room < 0:
                break
            data[name] = found
            kept.append(iteration)
        data["run"][f"{kind.removesuffix('s')}_iterations"] = sorted(kept)
        if len(kept) < len(wanted):
            left_out[kind] = len(wanted) - len(kept)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(json.loads(json.dumps(data, default=str))), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--export {file}: cannot be written ({error.strerror}); choose another file") from None
    return "".join(f"; {kind} of the {count} oldest iterations left out" for kind, count in left_out.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory; further ones are compared with the first"
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port on loopback; default: a free one")
    parser.add_argument("--export", metavar="FILE", help="write one HTML file instead of serving")


def view(options: argparse.Namespace) -> int:
    """Serves until interrupted, or exports. Raises UserError."""
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
