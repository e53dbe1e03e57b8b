"""Puts a fault into the processes of a real run, before anything of the run is imported there.

A run gets `variables(directory, fault)`: a sitecustomize that is found first imports this module,
which waits for the module that the fault is in. Imports nothing of the run by itself, so that
processes without the module are as ever.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "PA_NPU_FAULT_OF_TEST"
LAYER = "layers.1"

OF_SENDERS = "one sender "
"""How faults of one of several senders begin; tests.helpers.sender_faults has them."""
SENT_OLD = "a tensor of a layer sent from an old copy"
KEPT_OLD = "a tensor of a layer kept by the engine"
PUBLISHES = {
    SENT_OLD: r"I5: as weight version 1 the trainers sent other values than they train, .* in 1 of .* "
    r"still those of version 0",
    # in two tensors where an engine computes with a packed copy, as vLLM does in bf16 on a CPU
    KEPT_OLD: r"I5: engine .* holds other values than were sent as weight version 1 in [12] of .*",
}
"""Faults of a publish, and what the run's last lines say."""
SCALED = "adapters merged twice as strongly by the engine"
ADAPTERS = {SCALED: r"I5 agreement: in .* engine and trainer log-probs have"}
"""Faults of an engine that gets adapters alone, likewise."""
EXCHANGED = "rewards exchanged on the way to the trainers"
GROUPS = {EXCHANGED: r"I2 exactly once: iteration 1, .* was read with other tokens, log-probs or"}
"""Faults of groups between the coordinator and the trainers, likewise."""
SESSIONS = {
    "a turn of a session not trained": r"I2 exactly once: .* train \d+ tokens, where the turns of "
    r"its sessions have",
    "a turn of a session trained in part": r"I2 exactly once: .* are no answers of an engine",
    "a session trained twice": r"I2 exactly once: .* it is trained a second time",
    "a session's sample missing": r"I2 exactly once: .* train \d+ tokens, where the turns of its "
    r"sessions have",
    "rewards of another session": r"I7 rewards: .* were given to other texts",
    "sessions in another order than their rewards": r"I7 rewards: .* were given to other texts",
    "a token dropped from a branch": r"I2 exactly once: .* are no answers of an engine",
    "a token that a tool wrote changed": r"I2 exactly once: .*the engine wrote them for sample "
    r"\d+, turn \d+, behind other tokens",
    "log-probs of a turn shifted": r"I2 exactly once: .* are no answers of an engine",
    "a turn under another version": r"I1 version: .* are said to be of versions 0 to 0, where the "
    r"engine wrote them with version 1",
}
"""Faults of groups of sessions, likewise."""


def variables(directory: Path, fault: str) -> dict[str, str]:
    """Returns the environment of a run with this fault. directory: one that this makes."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(
        "from tests.helpers import fault_in_run\n\nfault_in_run.install()\n"
    )
    paths = [str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path), VARIABLE: fault}


def install() -> None:
    """In a process of the run: injects the fault once its module is imported."""
    fault = os.environ.get(VARIABLE, "")
    place, inject = _place_of(fault)
    sys.meta_path.insert(0, _AfterImport(place, inject))


def _place_of(fault: str) -> tuple[str, Callable[[ModuleType], None]]:
    if fault == SENT_OLD:
        return "pa_npu.backends.buckets", _send_old
    if fault == KEPT_OLD:
        return "pa_npu.engines.weight_calls", _keep_old
    if fault == SCALED:
        return "pa_npu.weight_transfer.adapters", _merge_twice
    if fault == EXCHANGED:
        return "pa_npu.samples.iterator", _exchange_rewards
    if fault.startswith(OF_SENDERS):
        return "pa_npu.backends.buckets", lambda module: _into_sender(fault, module)
    if fault in SESSIONS:
        return "pa_npu.coordinator.episode", lambda module: into_sessions(fault, module)
    return "pa_npu.trainer.learner", lambda module: _into_learner(fault, module)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as all others do, and calls `inject` with it once it is executed."""

    def __init__(self, name: str, inject: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._inject = inject

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self._inject(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _into_learner(fault: str, module: ModuleType) -> None:
    """Faults of steps, losses and gradients, in every trainer rank."""
    make = module.Learner.__init__

    def made(self: Any, *arguments: Any, **keys: Any) -> None:
        from tests.helpers import gradient_faults

        make(self, *arguments, **keys)
        gradient_faults.inject(fault, self)

    module.Learner.__init__ = made


def _into_sender(fault: str, module: ModuleType) -> None:
    from tests.helpers import sender_faults

    sender_faults.inject(fault, module.GatheredWeights)


def _send_old(module: ModuleType) -> None:
    """Of one tensor every publish sends what the first one sent, wherever buckets are laid out."""
    start = module.GatheredWeights._start

    def changed(self: Any, bucket: Any, parts: Any) -> Any:
        kept = vars(self).setdefault("_kept_by_test", {})
        of_layer = [
            name for name in parts if LAYER in name and "down_proj" in name and "lora_A" not in name
        ]
        if of_layer:  # another pipeline stage may hold it
            parts = dict(parts)
            parts[of_layer[0]] = _Old(parts[of_layer[0]], kept)
        return start(self, bucket, parts)

    module.GatheredWeights._start = changed


class _Old:
    """A part that lays out what it has laid out first."""

    def __init__(self, part: Any, kept: dict[int, Any]) -> None:
        self._part = part
        self._kept = kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def lay(self, out: Any, first: int) -> None:
        if first not in self._kept:
            self._part.lay(out, first)
            self._kept[first] = out.clone()
        else:
            out.copy_(self._kept[first])


def _keep_old(module: ModuleType) -> None:
    """Of one tensor the engine's loader is given what it was given first."""
    kept: dict[str, Any] = {}

    def old(weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            if LAYER in name and "down_proj" in name and "experts" not in name:
                tensor = kept.setdefault(name, tensor.clone())
            yield name, tensor

    load = module.LiveWeights.received
    module.LiveWeights.received = lambda self, weights: old(load(self, weights))


def _merge_twice(module: ModuleType) -> None:
    """Engines alone make whole weights of adapters."""
    merged = module.BaseDirectory.merged

    def changed(self: Any, adapters: Any) -> Any:
        twice = [(name, 2 * part if ".lora_B." in name else part) for name, part in adapters]
        return merged(self, twice)

    module.BaseDirectory.merged = changed


def _exchange_rewards(module: ModuleType) -> None:
    """In every group of iteration 1 each response gets the reward of the one before it."""
    read = vars(module)["from_bytes"]

    def changed(*arguments: Any) -> Any:
        from dataclasses import replace

        import numpy as np

        group = read(*arguments)
        if group.iteration != 1:
            return group
        starts = group.offsets()[:-1] + [
            int(trained.argmax()) for trained in np.split(group.trained, group.offsets()[1:-1])
        ]
        by_response = np.roll(group.advantages[starts], 1)
        advantages = np.repeat(by_response, group.lengths) * group.trained
        return replace(
            group,
            rewards=np.roll(group.rewards, 1),
            advantages=advantages.astype(group.advantages.dtype),
        )

    vars(module)["from_bytes"] = changed


def into_sessions(fault: str, module: ModuleType) -> None:
    """Changes a group that leaves the coordinator, in iteration 1."""
    make = module.ScoredGroup.group
    changed_groups: list[int] = []

    def changed(
        self: Any, run_seed: int, iteration: int, index: int, *rest: Any, **keys: Any
    ) -> Any:
        number = _sample_to_change(fault, self.samples)
        if iteration == 1 and number is not None and not changed_groups:
            changed_groups.append(index)
            _change(fault, self, number)
        return make(self, run_seed, iteration, index, *rest, **keys)

    module.ScoredGroup.group = changed


def _sample_to_change(fault: str, samples: Sequence[Any]) -> int | None:
    """The first sample that can have the fault: most need a second turn, or another session."""
    if fault.startswith("sessions") and len({sample.text for sample in samples}) < 2:
        return None
    for number, sample in enumerate(samples):
        if fault not in _OF_LATER_TURNS or len(_turns(sample)) > 1:
            return number
    return None


_OF_LATER_TURNS = (
    "a turn of a session not trained",
    "a token dropped from a branch",
    "a token that a tool wrote changed",
)


def _turns(sample: Any) -> list[slice]:
    """Its stretches of trained tokens."""
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.trained, [False]]).astype(int)))
    return [slice(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]


def _change(fault: str, scored: Any, number: int) -> None:
    from dataclasses import replace

    import numpy as np

    samples = list(scored.samples)
    sample = samples[number]
    trained = sample.trained.copy()
    stretch = _turns(sample)[0]
    if fault == "a turn of a session not trained":
        trained[stretch] = False
    elif fault == "a turn of a session trained in part":
        trained[stretch.stop - 1] = False
    elif fault == "a session trained twice":
        samples[-1] = sample
    elif fault == "a session's sample missing":
        samples = samples[:-1]
        scored.result = replace(scored.result, total=scored.result.total[:-1], scored="")
    elif fault == "sessions in another order than their rewards":
        samples = samples[::-1]
    elif fault == "a token dropped from a branch":
        samples[number] = _without_token(sample, _turns(sample)[1].start - 1)
    elif fault == "a token that a tool wrote changed":
        tokens = sample.tokens.copy()
        tokens[_turns(sample)[1].start - 1] += 1
        samples[number] = replace(sample, tokens=tokens)
    elif fault == "log-probs of a turn shifted":
        logprobs = sample.logprobs.copy()
        logprobs[stretch] = np.roll(logprobs[stretch], 1) - 0.01
        samples[number] = replace(sample, logprobs=logprobs)
    elif fault == "a turn under another version":
        versions = sample.versions.copy()
        versions[stretch] -= 1
        samples[number] = replace(sample, versions=versions)
    elif fault == "rewards of another session":
        scored.result = replace(scored.result, total=np.roll(scored.result.total, 1) + 1)
    if fault.startswith("a turn of a session"):
        logprobs, versions = sample.logprobs.copy(), sample.versions.copy()
        logprobs[~trained], versions[~trained] = 0, -1
        samples[number] = replace(sample, component=trained, logprobs=logprobs, versions=versions)
    scored.samples = samples


def _without_token(sample: Any, place: int) -> Any:
    from dataclasses import replace

    import numpy as np

    names = ("tokens", "component", "logprobs", "versions")
    kept = {name: np.delete(getattr(sample, name), place) for name in names}
    return replace(sample, **kept)
