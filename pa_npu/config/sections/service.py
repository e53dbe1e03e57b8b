"""Keys of `pa-npu serve`: where it listens, what clients may use of it, how long it waits for them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pa_npu.config.sections import Section


class ServiceConfig(Section):
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address that `pa-npu serve` listens on. Requests need a key, but travel in "
        "clear text: on another address than loopback put a proxy with TLS before it.",
    )
    port: int = Field(
        8421, ge=0, le=65535, description="Port that it listens on. 0 takes a free one."
    )
    model_name: str | None = Field(
        None,
        min_length=1,
        description="Name by which clients ask for the model (base_model). null takes the last part "
        "of model.path; the path itself is a name too.",
    )
    slots: int = Field(
        4, ge=1, le=4096, description="Number of models that clients may train at a time."
    )
    sessions: int = Field(64, ge=1, le=2**16, description="Number of clients at a time.")
    pending: int = Field(
        1024,
        ge=1,
        le=2**20,
        description="Number of requests of a client that may wait for their answers.",
    )
    answers: int = Field(
        1024,
        ge=1,
        le=2**20,
        description="Number of answers of a model, and of a client's samples, that are kept for "
        "clients that ask again.",
    )
    snapshots: int = Field(
        8,
        ge=1,
        le=4096,
        description="Number of snapshots without a name that are kept of a model. A further one "
        "takes the place of the oldest.",
    )
    saved: int = Field(
        64, ge=1, le=2**16, description="Number of weights that a model may save under names."
    )
    samples: int = Field(
        256, ge=1, le=4096, description="Maximum number of samples of one request."
    )
    datums: int = Field(
        1024, ge=1, le=2**16, description="Maximum number of datums in one request."
    )
    request_mib: int = Field(64, ge=1, le=1024, description="Maximum size of a request, in MiB.")
    session_timeout_s: float = Field(
        300.0,
        gt=0,
        description="After so long without a word a client is gone: its session ends and its slots "
        "are free.",
    )
    gap_timeout_s: float = Field(
        300.0,
        gt=0,
        description="How long a request waits for one with a lower number before it is dropped.",
    )
    call_timeout_s: float = Field(1800.0, gt=0, description="Deadline of one call on the trainers.")
    sample_timeout_s: float = Field(
        1800.0, gt=0, description="Deadline of one request for samples."
    )
    checkpoint_every: int = Field(
        16,
        ge=1,
        description="Steps of a slot between two states on disk. After a restart the requests behind "
        "the last one are carried out again.",
    )
    unembed: Literal["refuse", "leave_out"] = Field(
        "refuse",
        description="What happens to clients that ask for adapters of the LM head (train_unembed, "
        "which is the SDK's default) although there are none: an error, or training without them.",
    )
    strict: bool = Field(
        False,
        description="Refuse training on samples that do not say which they are (model_input_spans), "
        "or that other weights wrote than the model's when they are trained.",
    )
