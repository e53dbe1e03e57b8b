"""Rules for processes: engines and their lengths, where each stands (nodes, devices, ports), and deadlines in order."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.sections import Section
from pa_npu.config.sections.rollout import SLOWEST_TOKEN_S
from pa_npu.config.tree import ConfigTree
from pa_npu.config.words import counted

_KEY = "rollout.engine_settings"
_LEAST_TEMPERATURE = 0.01  # what vLLM raises smaller ones to, but for 0


def broken_engines(c: ConfigTree) -> Iterator[str]:
    """Yields one line per rule that is broken: keys, values, rule, remedy."""
    r = c.rollout
    if r.temperature < _LEAST_TEMPERATURE:
        yield (
            f"rollout.temperature: {r.temperature}: engines sample at {_LEAST_TEMPERATURE} instead "
            f"of less, and the trainer's log-probs would not match; set it to {_LEAST_TEMPERATURE} "
            "or more"
        )
    if r.attach and len(r.attach) != c.rollout.engines:
        yield (
            f"rollout.attach: {len(r.attach)} URLs for rollout.engines = {r.engines}; list one "
            "URL per engine"
        )
    if r.window != "auto" and r.window < r.responses_per_prompt:
        yield (
            f"rollout.window: {counted(r.window, 'sequence')} cannot hold one group of "
            f"rollout.responses_per_prompt = {r.responses_per_prompt}; set it to at least "
            f"{r.responses_per_prompt} or to auto"
        )
    longest = c.engine_tokens
    with_response = c.data.max_prompt_tokens + r.max_response_tokens
    if longest > max(r.max_num_batched_tokens, with_response):
        yield (
            f"rollout.max_num_batched_tokens: {r.max_num_batched_tokens} is less than the "
            f"{longest} tokens of a prompt with its hint and a response (teacher.NAME."
            "max_prompt_tokens + rollout.max_response_tokens + 1), which an engine would score in "
            "chunks; raise it, or lower one of these"
        )
    elif with_response > r.max_num_batched_tokens:
        yield (
            f"rollout.max_num_batched_tokens: {r.max_num_batched_tokens} is less than "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {c.data.max_prompt_tokens} + "
            f"{r.max_response_tokens}, so that a sequence would be prefilled in chunks, which "
            f"seeded sampling does not allow; raise it to at least {with_response}"
        )
    if r.max_num_seqs > r.max_num_batched_tokens:
        yield (
            f"rollout.max_num_seqs: {r.max_num_seqs} exceeds rollout.max_num_batched_tokens = "
            f"{r.max_num_batched_tokens}; lower it, a step has one token per sequence at least"
        )
    yield from _broken_single_engines(c)


def _broken_single_engines(c: ConfigTree) -> Iterator[str]:
    """Yields what is wrong with settings of single engines: which there are, their windows and
    devices.
    """
    r = c.rollout
    number = max(c.rollout.engines, r.max_engines or 0)
    named = [index for entry in r.engine_settings for index in entry.engines]
    for index in sorted(set(named)):
        if index >= number:
            yield (
                f"{_KEY}: there is no engine {index}: the run has {number}, numbered from 0 "
                f"(rollout.engines); name one of 0 to {number - 1}"
            )
        if named.count(index) > 1:
            yield (
                f"{_KEY}: engine {index} is named {named.count(index)} times; put all that is "
                "said of it into one entry"
            )
    for entry in r.engine_settings:
        which = (
            f"engine{'s' if len(entry.engines) > 1 else ''} {', '.join(map(str, entry.engines))}"
        )
        if entry.window is not None and entry.window < r.responses_per_prompt:
            yield (
                f"{_KEY}: a window of {entry.window} for {which} cannot hold one group of "
                f"rollout.responses_per_prompt = {r.responses_per_prompt}; set it to at least "
                f"{r.responses_per_prompt}, or remove it"
            )
        kind = entry.device_kind
        if kind is not None and not r.attach and c.run.device not in ("auto", kind):
            yield (
                f"{_KEY}: {which} on {entry.device}, but the run starts its engines on "
                f"run.device={c.run.device}; start them where they are and attach them "
                "(rollout.attach), or remove the device"
            )


def broken_placement(c: ConfigTree) -> Iterator[str]:
    """Yields one line per rule that is broken: keys, values, rule, remedy."""
    r = c.rollout
    if c.placement.nnodes > 1 and c.placement.cluster == "local":
        yield (
            f"placement.nnodes: {c.placement.nnodes} with placement.cluster=local, which is this "
            "machine alone; set placement.cluster=ray, or nnodes to 1"
        )
    if c.agent.port is not None and c.placement.colocate:
        yield (
            "agent.port: with placement.colocate engines could write for other programs while "
            "trainers have the devices; set colocate to false, or remove the port"
        )
    if r.max_engines is not None and r.max_engines < r.engines:
        yield (
            f"rollout.engines: {r.engines} is above rollout.max_engines = {r.max_engines}; lower "
            "it, or raise the maximum"
        )
    if (r.max_engines or r.engines) > r.engines and (c.placement.cluster == "local" or r.attach):
        yield (
            f"rollout.max_engines: {r.max_engines}: more than rollout.engines = {r.engines} come "
            "with nodes of a Ray cluster only, and not beside rollout.attach; set "
            "placement.cluster=ray, or one number of engines"
        )
    if (
        c.placement.nnodes > 1
        and c.placement.devices_per_node is None
        and c.devices.num_devices % c.placement.nnodes
    ):
        yield (
            f"placement.nnodes: {counted(c.devices.num_devices, 'device')} of engines and trainers cannot "
            f"be divided evenly among {counted(c.placement.nnodes, 'node')}; change "
            "rollout.engines, trainer.devices or placement.nnodes, or set "
            "placement.devices_per_node to what each node has"
        )
    if c.devices.num_devices > c.placement.nnodes * (
        c.placement.devices_per_node or c.devices.num_devices
    ):
        yield (
            f"placement.devices_per_node: {counted(c.devices.num_devices, 'device')} of engines and "
            f"trainers are more than {counted(c.placement.nnodes, 'node')} of "
            f"{c.placement.devices_per_node}; lower rollout.engines or trainer.devices, or raise "
            "placement.nnodes"
        )
    yield from _broken_colocation(c)
    num_ports = c.rollout.engines * (not c.rollout.attach) + len(c.teacher_engines)
    if c.placement.port + num_ports > 65535:
        yield (
            f"placement.port: {c.placement.port} and the ports of "
            f"{counted(num_ports, 'engine')} behind it run past 65535; set it to at most "
            f"{65535 - num_ports}, or 0 for free ones"
        )
    if c.placement.devices is not None and len(c.placement.devices) != c.devices.num_devices:
        yield (
            f"placement.devices: {len(c.placement.devices)} indices for "
            f"{counted(c.devices.num_devices, 'device')} of engines, teachers and trainers; list exactly "
            f"{c.devices.num_devices}, or remove the key"
        )


def _broken_colocation(c: ConfigTree) -> Iterator[str]:
    """Engines and trainers in turn on the same devices."""
    t, r, s = c.trainer, c.rollout, c.schedule
    if not c.placement.colocate:
        return
    if s.max_staleness:
        yield (
            "placement.colocate: a device decodes, then trains, and with schedule.max_staleness = "
            f"{s.max_staleness} both work at once; set max_staleness to 0, or colocate to false"
        )
    if (r.max_engines or r.engines) > r.engines:
        yield (
            f"placement.colocate: engines that join a run (rollout.max_engines = {r.max_engines}) "
            "have devices of their own; set one number of engines"
        )
    if r.engines * r.tensor_parallel > t.devices:
        yield (
            f"placement.colocate: rollout.engines = {r.engines} of "
            f"{counted(r.tensor_parallel, 'device')} (rollout.tensor_parallel) are more than the "
            f"{counted(t.devices, 'trainer device')}; set engines to at most "
            f"{t.devices // r.tensor_parallel}"
        )
    if c.devices.engines_sleep and any(
        "expandable_segments:true" in value.lower() for value in r.env.values()
    ):
        yield (
            "rollout.env: expandable segments with engines that sleep, whose allocator has none; "
            "remove the variable, or set rollout.sleep=false"
        )
    if r.sleep and c.run.device == "cpu":
        yield (
            "rollout.sleep: true with run.device=cpu, whose engines have no memory of a device "
            "to give back; remove the key"
        )


_LONGEST_WAIT_S = 10_000_000  # four months; the clocks of some libraries overflow above


def broken_deadlines(c: ConfigTree) -> Iterator[str]:
    """Yields deadlines that end before those of the work they wait for: the error would name the
    wrong party.
    """
    for section, values in c:
        if not isinstance(values, Section):  # of names of the user's, which have no deadlines
            continue
        for key, value in values:
            if key.endswith("_s") and value is not None and value > _LONGEST_WAIT_S:
                yield (
                    f"{section}.{key}: {value:g} s is longer than any run; set it to "
                    f"{_LONGEST_WAIT_S} or less"
                )
    wait_s = c.deadlines.wait_timeout_s
    if c.environment.has_gateway:
        awaited = "the sessions of a group"
        why = (
            f"environment.timeout_s = {c.deadlines.environment_timeout_s:g} for each of "
            f"rollout.responses_per_prompt = {c.rollout.responses_per_prompt}, agent.concurrent = "
            f"{c.agent.concurrent} at once, which begin when others end"
        )
    else:
        awaited = "a request"
        why = (
            f"rollout.request_timeout_s = {c.rollout.request_timeout_s:g} and {SLOWEST_TOKEN_S:g} "
            f"s for each of rollout.max_response_tokens = {c.rollout.max_response_tokens}"
        )
    if c.trainer.wait_timeout_s is None and wait_s > _LONGEST_WAIT_S:
        yield (
            f"trainer.wait_timeout_s: a group may take {wait_s:g} s ({why}), longer than any "
            "run; lower these"
        )
    elif wait_s < c.deadlines.group_limit_s:
        yield (
            f"trainer.wait_timeout_s: {wait_s:g} s is shorter than the {c.deadlines.group_limit_s:g} s that "
            f"{awaited} may take ({why}), so that trainers would give up on a group that still has "
            "time; set it to at least that, or remove it"
        )
    elif (
        c.deadlines.reward_limit_s
        and wait_s < c.deadlines.group_limit_s + c.deadlines.reward_limit_s
    ):
        yield (
            f"trainer.wait_timeout_s: {wait_s:g} s is shorter than the {c.deadlines.group_limit_s:g} s of "
            f"{awaited} and the {c.deadlines.reward_limit_s:g} s that the group's rewards may take then "
            "(reward.judge: timeout_s and concurrency; reward.code.timeout_s and reward.workers; "
            "reward.timeout_s), so that trainers would give up on a group that still has time; set "
            f"it to at least {c.deadlines.group_limit_s + c.deadlines.reward_limit_s:g}, remove it, or lower these"
        )
    if wait_s < 2 * c.publish.timeout_s:
        yield (
            f"trainer.wait_timeout_s: {wait_s:g} s is shorter than twice publish.timeout_s = "
            f"{c.publish.timeout_s:g} s, for which the tensor-parallel peers of a rank that joins "
            "engines and sends to them may wait in a collective; set it to at least "
            f"{2 * c.publish.timeout_s:g}, or lower publish.timeout_s"
        )
