"""The coordinator writes a line of the run's chain (telemetry/chain.py) with each iteration's record."""

from __future__ import annotations

from pathlib import Path

import pa_npu
from pa_npu.checkpoints.directories import read_meta
from pa_npu.checkpoints.provenance import (
    arrangement_of,
    config_tree,
    models_fingerprint,
    trained_configuration,
)
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import BORDER, DATA_POSITION, BorderReport, IterationReport, RunsOn
from pa_npu.coordinator.delivery import Produced
from pa_npu.coordinator.record import RecordDigests
from pa_npu.data.image_rows import ImageInput
from pa_npu.telemetry.chain import ChainWriter, digest_of_values, group_fields


class RunChain:
    """Makes the lines and writes them. Owns the file: use `with`."""

    def __init__(
        self, config: Config, channel: StoreChannel, first_iteration: int, runs_on: RunsOn
    ) -> None:
        """first_iteration: as ChainWriter."""
        self._config = config
        self._channel = channel
        self._writer = ChainWriter(config.run.dir, first_iteration)
        tree = config_tree(config)
        self._of_run = {
            "configuration": digest_of_values(trained_configuration(tree)),
            "arrangement": arrangement_of(tree),
            "software": software_of(runs_on) | image_software(config),
            "model": models_fingerprint(config),
        }
        self._weights: str | None = None  # after the iteration that was written last
        self._checkpoints: dict[str, str] = {}  # to be named by the next line
        if config.checkpoint.load:
            meta = read_meta(Path(config.checkpoint.load))
            self._checkpoints[str(meta.version)] = meta.digest

    def __enter__(self) -> RunChain:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._writer.close()

    async def write(
        self,
        produced: Produced,
        report: IterationReport,
        border: BorderReport,
        records: RecordDigests,
    ) -> None:
        """Writes an iteration's line. border: the one that ends it. Raises DeadlineExceeded."""
        iteration = produced.iteration
        limit_s = self._config.deadlines.wait_timeout_s
        if self._weights is None:
            begin = await BORDER.wait_async(self._channel, limit_s, version=iteration)
            self._weights = begin.weights
        position = await DATA_POSITION.wait_async(self._channel, limit_s, iteration=iteration)
        completed = border.checkpoint
        if completed.checkpoint_completed is not None and completed.checkpoint_digest is not None:
            self._checkpoints[str(completed.checkpoint_completed)] = completed.checkpoint_digest
        self._writer.write(
            {
                "iteration": iteration,
                **self._of_run,
                "data": digest_of_values(position.state),
                **group_fields(produced.digests),
                "gradient_norms": tuple(norm.hex() for norm in report.gradient_norms),
                "weights_before": self._weights,
                "weights_after": border.weights,
                "record": records.metrics,
                "samples": records.samples,
                "checkpoints": self._checkpoints,
            }
        )
        self._weights = border.weights
        self._checkpoints = {}


def image_software(config: Config) -> dict[str, str]:
    """Returns what pixels depend on, for a run whose model reads images."""
    images = ImageInput.from_config(config)
    return {"images": images.reader.processor.identity} if isinstance(images, ImageInput) else {}


def software_of(runs_on: RunsOn) -> dict[str, str]:
    """Returns versions and kinds of devices by name, which may change the bits of what is computed."""
    trainers = runs_on.trainers
    engines = {
        f"{engine.kind} {engine.version or '(version unknown)'}" for engine in runs_on.engines
    }
    devices = {engine.device for engine in runs_on.engines if engine.device is not None}
    return {
        "pa_npu": pa_npu.__version__,
        "python": trainers.python,
        "torch": trainers.torch,
        "backend": trainers.backend,
        "device": trainers.device,
        "collectives": trainers.collectives,
        "attention": f"{trainers.kernel}, merged by {trainers.merge}",
        "engines": ", ".join(sorted(engines)),
        "engine devices": ", ".join(sorted(devices)),
    }
