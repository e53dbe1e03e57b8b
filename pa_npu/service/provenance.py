"""With service.strict a policy gradient trains what the model's own weights have sampled, and nothing else."""

from __future__ import annotations

from pa_npu.service.registry import VERSIONING, Model, Registry
from pa_npu.service.wire import ForwardBackward, Refused


def check_provenance(registry: Registry, model: Model, call: ForwardBackward) -> None:
    """Raises Refused for a datum that other weights wrote than the model has when the call is
    carried out, or that does not say which samples it is of.
    """
    if call.loss == "cross_entropy":
        return
    version = _version_at(model, call.seq_id)
    for number, datum in enumerate(call.data):
        if not datum.sampled:
            raise Refused(
                f"data[{number}]: service.strict is on, and nothing says which samples it is of; "
                "give its provenance (model_input_spans), or serve with service.strict=false"
            )
        for sequence in datum.sampled:
            sampled = _sampled_version(registry, sequence, model)
            if sampled != version:
                raise Refused(
                    f"data[{number}]: {sequence[:80]!r} was sampled by version {sampled} of this "
                    f"model, and would train version {version}; sample again after each step"
                )


def _version_at(model: Model, seq: int) -> int:
    """Returns the model's version when request `seq` is carried out."""
    version = model.version
    for number in range(model.next, seq):
        future = model.futures.get(number)
        if future is None:
            raise Refused(
                f"seq_id: {seq} comes before {number}; with service.strict requests are accepted "
                "in their order",
                409,
            )
        if future.request.route in VERSIONING:
            version = int(future.request.decided["version"])
    return version


def _sampled_version(registry: Registry, sequence: str, model: Model) -> int | None:
    """Returns the model's version that wrote a sampled sequence; None if it is not of this model."""
    future = registry.futures.get(sequence.rpartition("#")[0])
    if future is None or future.request.decided.get("of_model") != model.id:
        return None
    return int(future.request.decided["of_version"])
