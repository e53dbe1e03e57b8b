"""Changes to torch and Megatron are in one list, each with its reason and its end; nothing outside that room makes one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pa_npu import platform as platforms
from pa_npu.backends.megatron.patches.table import PATCHES, patches_of

PACKAGE = Path(__file__).resolve().parents[3] / "pa_npu"
PATCHED = ("torch", "numpy", "megatron", "mindspeed", "torch_npu")
# Switches that torch offers as attributes: settings of the run, not changes of what torch does.
SETTINGS = {
    "torch.backends.cudnn.deterministic",
    "torch.utils.deterministic.fill_uninitialized_memory",
}


def test_every_patch_says_what_why_where_and_when_it_can_go() -> None:
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        for text in (patch.target, patch.reason, patch.versions, patch.remove_when):
            assert len(text.split()) >= (1 if text is patch.target else 2), patch
        assert patch.devices and set(patch.devices) <= set(platforms.KINDS), patch
        assert all(text in patch.line() for text in (patch.target, patch.reason, patch.remove_when))


@pytest.mark.parametrize(
    ("kind", "with_mindspeed", "before"),
    [("cpu", False, 3), ("cuda", False, 0), ("npu", True, 2), ("npu", False, 4)],
)
def test_a_device_kind_gets_its_patches_in_order(
    kind: str, with_mindspeed: bool, before: int
) -> None:
    patches = patches_of(kind, with_mindspeed)
    assert sum(patch.before_import for patch in patches) == before
    assert {patch.target for patch in patches} >= {
        patch.target for patch in PATCHES if len(patch.devices) == 3
    }


def assigned_attributes(source: str) -> set[str]:
    """Dotted names under the patched packages that a module assigns to, also by setattr, and their
    aliases resolved.
    """
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }

    def dotted(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return names.get(node.id, "") if isinstance(node, ast.Name) else ""

    found = set()
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [
                item
                for target in node.targets
                for item in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("setattr", "delattr")
        ):
            found.add(f"{dotted(node.args[0])}.{ast.unparse(node.args[1])}")
        found |= {dotted(target) for target in targets if isinstance(target, ast.Attribute)}
    return {name for name in found if name.partition(".")[0] in PATCHED}


def test_nothing_outside_the_list_assigns_to_torch_or_megatron() -> None:
    patches = PACKAGE / "backends" / "megatron" / "patches"
    # in the list too, which calls it; FSDP2's ranks and engines make the same change without Megatron
    of_engines_too = PACKAGE / "weight_transfer" / "gloo_device.py"
    assert any("weight_transfer.gloo_device" in patch.target for patch in PATCHES)
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.parent != patches and file != of_engines_too:
            changed = assigned_attributes(file.read_text()) - SETTINGS
            assert not changed, (
                f"{file.relative_to(PACKAGE)} changes {sorted(changed)}: list it in "
                "backends/megatron/patches"
            )


def test_the_search_finds_assignments_that_are_there() -> None:
    patches = PACKAGE / "backends" / "megatron" / "patches"
    found = set().union(*(assigned_attributes(file.read_text()) for file in patches.glob("*.py")))
    assert "megatron.core.fp8_utils._quantize_param_shard_impl" in found
    assert "torch.cuda.get_device_capability" in found
    assert any(name.startswith("torch.Tensor.") for name in found), "setattr"
    assert assigned_attributes("import torch as t\nx.y = 1\nt.backends.z, a = 1, 2") == {
        "torch.backends.z"
    }
