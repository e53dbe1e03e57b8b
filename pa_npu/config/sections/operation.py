"""Keys of operating a run: telemetry, and where its processes stand."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from pa_npu.config.sections.base import Index, Section

TrackerName = Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio"]
TRACKERS: tuple[str, ...] = get_args(TrackerName)


class TelemetryConfig(Section):
    samples: Literal["all"] | Annotated[int, Field(ge=0)] = Field(
        4,
        description="Groups of each iteration kept in RUN/samples (parquet) with rewards, advantages, tokens and log-probs; "
        "all keeps every one, 0 none.",
    )
    trackers: tuple[TrackerName, ...] = Field(
        ("tensorboard",), description="Experiment trackers that get the run's records and samples beside its own files."
    )
    project: str = Field("pa_npu", min_length=1, description="The run's project with the trackers.")
    profile_iterations: tuple[int, ...] = Field(
        (), description="Iterations whose training is profiled into RUN/profile, which slows them; none by default."
    )


class BufferConfig(Section):
    shards: Literal["auto", "head", "node"] = Field(
        "auto",
        description="Where groups lie between coordinator and trainers: in the store on the head, or each on the node of the "
        "replica that trains it, in its first rank's process, while the head keeps what is filled and who is done; auto is node "
        "with several nodes.",
    )


LOOPBACK = "127.0.0.1"


class PlacementConfig(Section):
    cluster: Literal["local", "ray"] = Field(
        "local", description="What runs engines and trainers: this machine, or the nodes of a Ray cluster."
    )
    nnodes: int = Field(1, ge=1, description="Number of nodes; several need placement.cluster=ray.")
    devices_per_node: int | None = Field(
        None, ge=1, description="Devices (cpu: cores) of each node that the run uses; none divides them evenly."
    )
    host: str | None = Field(
        None,
        min_length=1,
        description="Address of this machine that the store listens on, and with cluster=local engines and trainers too; none is "
        "loopback, and on a Ray cluster the address that this node has there. Other nodes use theirs.",
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="First of the run's ports: the store's, behind which those of the engines follow; 0 takes free ones.",
    )
    devices: tuple[Index, ...] | None = Field(
        None,
        description="Device indices of the engines, then of the trainer ranks; with placement.colocate of the ranks alone. None "
        "takes the first ones.",
    )
    colocate: bool = Field(
        False,
        description="Engines on the trainers' devices and on no others; auto goes by prediction. With schedule.stream all "
        "decode, and when the rest fits on fewer engines, replica after replica trains; with stream=false engines generate the "
        "whole batch, then trainers train it.",
    )

    @property
    def address(self) -> str:
        """placement.host, resolved; on a cluster the launcher has put it there."""
        return self.host or LOOPBACK
