"""How weights reach engines on the trainers' devices (placement.colocate): publish.shared_through."""

from __future__ import annotations

from pa_npu.config.schema import Config
from pa_npu.weight_transfer.transport import Way


def way_to_shared(config: Config, one_group: bool) -> Way:
    """one_group: the backend of collectives can have two ranks of a group on one device, as gloo can.

    By handles where all is on this machine, as attached engines may not be: they may run in another container.
    """
    if config.publish.shared_through != "auto":
        return config.publish.shared_through
    if one_group:
        return "group"
    return "handles" if config.placement.nnodes == 1 and not config.rollout.attach else "host"


def device_way(config: Config) -> Way | None:
    """The way on devices with memory of their own, by run.device alone; None without such engines."""
    return way_to_shared(config, one_group=config.run.device == "cpu") if config.num_shared_engines else None


WAY_IN_WORDS: dict[Way, str] = {
    "group": "in the group of the other engines",
    "handles": "by memory handles from the stages' leaders",
    "host": "through host memory, in a gloo group of their own",
}
