"""vllm-ascend on a simulated machine; collects nothing in an ordinary process."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types

collect_ignore_glob = [] if "PA_NPU_SIM_ENGINE" in os.environ else ["test_*.py"]

if not collect_ignore_glob:
    import tests.npu_sim.environment  # noqa: F401 - imported for its effect

    # isort: split

    # ATB comes with NNAL, which has no stub: its operators are not there
    import torch_npu.op_plugin.atb._atb_ops as atb

    atb._register_atb_extensions = lambda: None
    # a patch of vllm-ascend's for image models imports it; transformers has to find it absent
    # before
    import transformers.image_utils  # noqa: F401

    for name in (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
