"""A run as one HTML file: the page with the data of the run inside, up to a size that a browser opens with ease."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pa_npu.errors import UserError
from pa_npu.viewer.page_file import page
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import answer

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
