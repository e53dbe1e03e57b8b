"""Rules for where processes stand: nodes, devices, ports, and engines that come with nodes."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.tree import ConfigTree
from pa_npu.config.words import counted


def broken_placement(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    r = c.rollout
    if c.placement.nnodes > 1 and c.placement.cluster == "local":
        yield (
            f"placement.nnodes: {c.placement.nnodes} with placement.cluster=local, which is this machine alone; set "
            f"placement.cluster=ray, or nnodes to 1"
        )
    if c.agent.port is not None and c.placement.colocate:
        yield (
            "agent.port: with placement.colocate engines could write for other programs while trainers have the devices; set "
            "colocate to false, or remove the port"
        )
    if r.max_engines is not None and r.max_engines < r.engines:
        yield f"rollout.engines: {r.engines} is above rollout.max_engines = {r.max_engines}; lower it, or raise the maximum"
    if (r.max_engines or r.engines) > r.engines and (c.placement.cluster == "local" or r.attach):
        yield (
            f"rollout.max_engines: {r.max_engines}: more than rollout.engines = {r.engines} come with nodes of a Ray cluster only, "
            f"and not beside rollout.attach; set placement.cluster=ray, or one number of engines"
        )
    if c.placement.nnodes > 1 and c.placement.devices_per_node is None and c.num_devices % c.placement.nnodes:
        yield (
            f"placement.nnodes: {counted(c.num_devices, 'device')} of engines and trainers cannot be divided evenly among "
            f"{counted(c.placement.nnodes, 'node')}; change rollout.engines, trainer.devices or placement.nnodes, or set "
            f"placement.devices_per_node to what each node has"
        )
    if c.num_devices > c.placement.nnodes * (c.placement.devices_per_node or c.num_devices):
        yield (
            f"placement.devices_per_node: {counted(c.num_devices, 'device')} of engines and trainers are more than "
            f"{counted(c.placement.nnodes, 'node')} of {c.placement.devices_per_node}; lower rollout.engines or "
            f"trainer.devices, or raise "
            f"placement.nnodes"
        )
    yield from _broken_colocation(c)
    if c.placement.port + c.num_engines * (not r.attach) > 65535:
        yield (
            f"placement.port: {c.placement.port} and the ports of {counted(c.num_engines, 'engine')} behind it run past 65535; set "
            f"it to at most {65535 - c.num_engines}, or 0 for free ones"
        )
    if c.placement.devices is not None and len(c.placement.devices) != c.num_devices:
        yield (
            f"placement.devices: {len(c.placement.devices)} indices for {counted(c.num_devices, 'device')} of engines and "
            f"trainers; list exactly {c.num_devices}, or remove the key"
        )


def _broken_colocation(c: ConfigTree) -> Iterator[str]:
    """Engines and trainers in turn on the same devices."""
    t, r, s = c.trainer, c.rollout, c.schedule
    if not c.placement.colocate:
        return
    if s.max_staleness:
        yield (
            f"placement.colocate: a device decodes, then trains, and with schedule.max_staleness = {s.max_staleness} both work "
            f"at once; set max_staleness to 0, or colocate to false"
        )
    if (r.max_engines or r.engines) > r.engines:
        yield (
            f"placement.colocate: engines that join a run (rollout.max_engines = {r.max_engines}) have devices of their own; set "
            f"one number of engines"
        )
    if r.engines * r.tensor_parallel > t.devices:
        yield (
            f"placement.colocate: rollout.engines = {r.engines} of {counted(r.tensor_parallel, 'device')} "
            f"(rollout.tensor_parallel) are more "
            f"than the {counted(t.devices, 'trainer device')}; set engines to at most {t.devices // r.tensor_parallel}"
        )
    if c.engines_sleep and any("expandable_segments:true" in value.lower() for value in r.env.values()):
        yield (
            "rollout.env: expandable segments with engines that sleep, whose allocator has none; remove the variable, or set "
            "rollout.sleep=false"
        )
    if r.sleep and c.run.device == "cpu":
        yield "rollout.sleep: true with run.device=cpu, whose engines have no memory of a device to give back; remove the key"
