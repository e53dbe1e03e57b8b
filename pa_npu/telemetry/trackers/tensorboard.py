"""TensorBoard: event files in RUN/tensorboard, written without torch; a resumed run takes back what comes again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from pa_npu.telemetry.trackers.protocol import TrackedRun

DIRECTORY = "tensorboard"


class TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id
        self._writer = EventFileWriter(str(Path(run.run_dir) / DIRECTORY))
        if run.first_step:
            # readers drop what earlier event files have of this step and later ones
            self._write(run.first_step, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=Summary(value=found))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        text = TensorProto(
            dtype=DT_STRING,
            string_val=[_markdown(columns, rows).encode("utf-8", "replace")],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag=f"{name}/text_summary", metadata=kind, tensor=text)
        self._write(step, summary=Summary(value=[value]))

    def finish(self) -> None:
        self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, **what))
        self._writer.flush()


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


start = TensorBoard
