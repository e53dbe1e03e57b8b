"""The rules of MindSpeed's activation, against a stand-in MindSpeed that breaks what the real one breaks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

STAND_INS = {
    "torch_npu/__init__.py": "",
    "torch_npu/contrib/__init__.py": "",
    "torch_npu/contrib/transfer_to_npu.py": "import order; order.add('transfer_to_npu')",
    "order.py": """
        events = []
        add = events.append
    """,
    "megatron/training/__init__.py": "",
    "mindspeed/__init__.py": "",
    "mindspeed/args_utils.py": """
        import argparse, sys
        _args = None
        def get_mindspeed_args():
            global _args
            if _args is None:
                assert len(sys.argv) == 1, f"arguments of ours reached MindSpeed: {sys.argv}"
                _args = argparse.Namespace(variable_seq_lengths=False)
            return _args
    """,
    "mindspeed/patch_utils.py": """
        class Patch:
            def __init__(self, owner, name, wrapper):
                self.owner, self.name, self.original = owner, name, getattr(owner, name)
                setattr(owner, name, wrapper(self.original))
            def remove_patch(self): setattr(self.owner, self.name, self.original)
            def remove_wrappers(self): pass
        class MindSpeedPatchesManager:
            patches_info = {}
    """,
    "mindspeed/megatron_adaptor.py": """
        import functools, logging, sys, torch, order
        import torch.distributed
        from mindspeed.args_utils import get_mindspeed_args
        from mindspeed.patch_utils import MindSpeedPatchesManager, Patch
        assert not any(name.startswith("megatron") for name in sys.modules), "MindSpeed must come before megatron"
        for module in list(sys.modules.values()):
            hasattr(module, "all_reduce")
        order.add(f"mindspeed variable_seq_lengths={get_mindspeed_args().variable_seq_lengths}")
        logging.getLogger().handlers[:] = [logging.NullHandler()]
        def wrap(fn):
            return functools.wraps(fn)(lambda *args: fn(*args))
        info = MindSpeedPatchesManager.patches_info
        info["torch.distributed.all_reduce"] = Patch(torch.distributed, "all_reduce", wrap)
        info["torch.Tensor.view"] = Patch(torch.Tensor, "view", wrap)
    """,
}


def run_with(stand_ins: dict[str, str], directory: Path, code: str) -> None:
    """Run `code` in a fresh interpreter that finds the stand-ins; they are written to `directory`."""
    for name, text in stand_ins.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{directory}:{ROOT}",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = [sys.executable, "-c", textwrap.dedent(code), "--an-argument-of-ours", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def test_activation_keeps_the_rules_and_refuses_what_cannot_work(tmp_path: Path) -> None:
    run_with(
        STAND_INS,
        tmp_path,
        """
        import logging, sys, types, torch, torch.distributed, order
        from pa_npu.errors import PaNpuError, UserError
        from pa_npu.backends.megatron.patches import mindspeed
        from pa_npu.backends.megatron.patches.table import prepare

        def error_of(function):
            try:
                function()
            except PaNpuError as error:
                return str(error)

        sys.modules["megatron.core"] = types.ModuleType("core")
        assert "megatron.core is already imported" in error_of(lambda: prepare("npu"))
        del sys.modules["megatron.core"]
        has_training, mindspeed._has_megatron_training = mindspeed._has_megatron_training, lambda: False
        assert "MindSpeed is installed but needs megatron.training" in error_of(lambda: prepare("npu"))
        assert has_training() and "megatron" not in sys.modules

        class Alias(types.ModuleType):
            def __getattr__(self, name):
                raise ModuleNotFoundError("torchvision")

        sys.modules["alias"] = alias = Alias("alias")
        handler = logging.StreamHandler()
        logging.getLogger().addHandler(handler)
        all_reduce, view, argv = torch.distributed.all_reduce, torch.Tensor.view, list(sys.argv)
        mindspeed.transfer_to_npu()
        mindspeed.activate()
        assert order.events == ["transfer_to_npu", "mindspeed variable_seq_lengths=True"], order.events
        assert torch.distributed.all_reduce is all_reduce and torch.Tensor.view is view
        assert sys.argv == argv and len(argv) == 3
        assert logging.getLogger().handlers == [handler]
        assert sys.modules["alias"] is alias

        from mindspeed.patch_utils import Patch
        del sys.modules["mindspeed.megatron_adaptor"]
        Patch.remove_patch = lambda self: None
        assert "its patch of torch.distributed.all_reduce could not be undone" in error_of(mindspeed.activate)
        """,
    )


def test_without_mindspeed_the_replacements_are_in_place(tmp_path: Path) -> None:
    stand_ins = {
        name: text
        for name, text in STAND_INS.items()
        if not name.startswith(("megatron/", "mindspeed/"))
    }
    run_with(
        stand_ins,
        tmp_path,
        """
        from pa_npu.backends.megatron.patches.repairs import NpuAdamW
        from pa_npu.backends.megatron.patches.table import prepare
        prepare("npu")
        import megatron.core.optimizer as optimizer, megatron.core.jit as jit
        assert optimizer.Adam is NpuAdamW
        function = lambda: 0
        assert jit.jit_fuser(function) is function
        """,
    )
