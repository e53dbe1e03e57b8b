"""The house keeps its order: imports point downwards, foreign names stay in their rooms, nothing goes in circles, all is named.

An exception is one line in a table below with its reason; one that is needed no longer fails, so
that the tables shrink.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable

import pytest

from pa_npu.config.schema import Config
from tests.helpers.house import PACKAGE, Import, circles, imports, modules, package_imports, uses

# From the top; a room imports rooms of its own layer and of those below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("api",),
    ("launcher",),
    ("coordinator", "trainer", "viewer", "agents", "service"),
    ("engines", "backends", "publish", "environments", "checkpoints"),
    ("samples", "families", "planning", "dispatch"),
    ("attention", "algorithm", "data", "rewards", "evaluation", "vision"),
    ("control", "weight_transfer"),
    ("telemetry", "platform"),
    ("config",),
    ("errors",),
)
LEVEL = {room: len(LAYERS) - index for index, layer in enumerate(LAYERS) for room in layer}
# Processes that share only what lies below them.
STRANGERS = {("coordinator", "trainer"), ("trainer", "coordinator")}
# A package below a room that only this room may import: everything else goes through the room's
# protocol.
INNER = {
    "pa_npu.backends.megatron": "backends",
    "pa_npu.engines.vllm": "engines",
    "pa_npu.engines.transformers": "engines",
}
# What stays in which folders (paths below pa_npu).
FOREIGN = {
    "vllm": ("engines/vllm",),
    "vllm_ascend": ("engines/vllm",),
    "megatron": ("backends/megatron",),
    "mindspeed": ("backends/megatron",),
    "torch_npu": ("platform", "attention/kernels", "backends/megatron/patches"),
}
# Device modules of torch; Megatron's own code asks for torch.cuda, and so do the layers that stand
# in for parts of it.
DEVICE_MODULES = {
    "torch.cuda": ("platform", "attention/kernels", "backends/megatron"),
    "torch.npu": ("platform", "attention/kernels"),
}
# (importing module, imported module or room): why it is so for now.
UPWARDS: dict[tuple[str, str], str] = {}
INNER_KNOWN: dict[tuple[str, str], str] = {}
DEVICES_KNOWN: dict[tuple[str, str], str] = {}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def own_imports() -> list[Import]:
    """Returns the imports of one room by another."""
    return [
        actual
        for actual in package_imports()
        if actual.target.startswith("pa_npu.")
        and room(actual.source)
        and room(actual.source) != room(actual.target)
    ]


def check(actual: Iterable[tuple[str, str, str]], exceptions: dict[tuple[str, str], str]) -> None:
    """found: (importing, imported, in words) of every breach."""
    breaches = {(source, target): words for source, target, words in actual}
    new = [words for key, words in breaches.items() if key not in exceptions]
    assert not new, "\n".join(new)
    stale = exceptions.keys() - breaches.keys()
    assert not stale, f"no exception is needed any more for {sorted(stale)}: remove it"
    assert all(reason for reason in exceptions.values())


def test_every_room_has_its_layer() -> None:
    rooms = {room(module) for module in modules()} - {""}
    assert rooms == LEVEL.keys(), "give a new room its layer, or remove one that is gone"


def test_imports_point_downwards() -> None:
    check(
        (
            (item.source, item.target, f"{item}: {room(item.target)} is above {room(item.source)}")
            for item in own_imports()
            if LEVEL[room(item.target)] > LEVEL[room(item.source)]
            or (room(item.source), room(item.target)) in STRANGERS
        ),
        UPWARDS,
    )


def test_what_is_behind_a_protocol_is_imported_by_its_room_alone() -> None:
    check(
        (
            (item.source, item.target, f"{item}: go through pa_npu.{owner}")
            for item in own_imports()
            for inner, owner in INNER.items()
            if f"{item.target}.".startswith(f"{inner}.") and room(item.source) != owner
        ),
        INNER_KNOWN,
    )


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_packages_stay_in_their_folders(name: str) -> None:
    for item in package_imports():
        if item.target.partition(".")[0] == name:
            path = modules()[item.source].relative_to(PACKAGE).as_posix()
            assert path.startswith(tuple(f"{folder}/" for folder in FOREIGN[name])), str(item)


@pytest.mark.parametrize("name", DEVICE_MODULES)
def test_nothing_outside_its_rooms_asks_for_a_device_module(name: str) -> None:
    actual = []
    for module, file in modules().items():
        path = file.relative_to(PACKAGE).as_posix()
        if not path.startswith(tuple(f"{folder}/" for folder in DEVICE_MODULES[name])):
            actual += [
                (module, name, f"{path}:{line} uses {name}: ask the platform")
                for line in uses(file.read_text(), name)
            ]
    check(actual, {key: reason for key, reason in DEVICES_KNOWN.items() if key[1] == name})


def test_no_module_reaches_itself_by_what_it_imports() -> None:
    known = modules()
    edges = [
        (item.source, item.target)
        for item in package_imports()
        if item.at_import and item.target in known
    ]
    assert not circles(edges)


def test_no_room_reaches_itself_through_other_rooms() -> None:
    assert not circles((room(item.source), room(item.target)) for item in own_imports())


def test_what_runs_inside_engines_imports_torch_and_that_engine_alone() -> None:
    """Engines may have an interpreter of their own, in which nothing else of ours is installed."""
    inside = tuple(
        f"pa_npu.engines.vllm.{part}"
        for part in ("worker", "streams", "expert_choices", "scores", "live")
    )
    inside += (
        "pa_npu.engines.weight_calls",
        "pa_npu.engines.live_weights",
        "pa_npu.platform.memory_peaks",
    )
    own = ("pa_npu.errors", "pa_npu.weight_transfer", *inside)
    known = modules()
    workers = [module for module in known if module in inside or room(module) == "weight_transfer"]
    assert len(workers) > 5
    for item in package_imports():
        if item.source in workers:
            name = item.target.partition(".")[0]
            # vLLM needs msgspec itself
            foreign = ("torch", "vllm", "msgspec", *sys.stdlib_module_names)
            allowed = item.target.startswith(own) if name == "pa_npu" else name in foreign
            assert allowed, f"{item}: it runs where only torch and the engine are installed"


def test_every_file_and_folder_says_what_it_is() -> None:
    firsts: dict[str, str] = {}
    for module, file in modules().items():
        docstring = ast.get_docstring(ast.parse(file.read_text()))
        assert docstring, (
            f"{module} has no docstring: its first line says what a reader gains by opening it"
        )
        first = docstring.splitlines()[0]
        assert len(first.split()) >= 4 and first.endswith((".", ":")), (
            f"{module}: {first!r} says too little"
        )
        assert first not in firsts, f"{module} and {firsts[first]} say the same"
        firsts[first] = module
    folders = {file.parent for file in modules().values()}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_the_search_finds_what_it_looks_for() -> None:
    """Controls: each kind of import, each kind of breach."""
    text = (
        "import a.b\nfrom pa_npu import trainer\nfrom pa_npu.trainer import loop, main\nfrom "
        "pa_npu.errors import UserError\n"
        "if TYPE_CHECKING:\n    import c\ndef f():\n    import d\n"
    )
    known = ("pa_npu.trainer", "pa_npu.trainer.loop", "pa_npu.errors")
    actual = list(imports("m", text, known))
    assert [(item.target, item.at_import) for item in actual] == [
        ("a.b", True),
        ("pa_npu.trainer", True),
        ("pa_npu.trainer.loop", True),
        ("pa_npu.trainer", True),
        ("pa_npu.errors", True),
        ("c", False),
        ("d", False),
    ]
    assert circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]) == [["a", "b", "c"]]
    assert circles([("a", "b"), ("b", "c"), ("a", "c")]) == []
    assert uses("x = torch.cuda.is_available()\ntorch.cudart()\n'torch.cuda'", "torch.cuda") == [1]
    with pytest.raises(AssertionError, match="a imports b"):
        check([("a", "b", "a imports b")], {})
    with pytest.raises(AssertionError, match="no exception is needed any more"):
        check([], {("a", "b"): "because"})


# What a feature is switched and set by, with the section that it stands in, or the part of Config
# that derives it; None: a function that reads the keys.
FEATURE_KEYS = {
    **dict.fromkeys(("max_staleness", "tokens_per_update", "dynamic_sampling"), "schedule"),
    **dict.fromkeys(("updates_per_iteration", "compare_iterations"), "schedule"),
    "engine_settings": "rollout",
    **dict.fromkeys(("mode", "divergence"), "publish"),
    "colocate": "placement",
    "router_replay": "algorithm",
    **dict.fromkeys(
        ("command", "programs", "port", "discards", "tool_parser", "concurrent", "output_kib"),
        "agent",
    ),
    **dict.fromkeys(("rank", "alpha", "targets"), "lora"),
    **dict.fromkeys(("expert_parallel", "shards", "frozen_pass"), "trainer"),
    "iterations_ahead": None,
    **dict.fromkeys(("trained_groups", "updates"), "schedule"),
    **dict.fromkeys(
        ("num_shared_engines", "follows_work", "unequal_groups", "reduces_in_buckets"), "devices"
    ),
    "lies_on_nodes": "buffer",
}
MOST_READERS = 3
# The file that is the feature, where it reads its keys itself.
OWN = dict.fromkeys(
    ("max_staleness", "iterations_ahead", "divergence", "tokens_per_update"), "control/freshness.py"
)
# Read in more files: how many, and why.
MANY_READERS: dict[str, tuple[int, str]] = {}


SMALLEST = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})


def test_the_parts_that_feature_keys_stand_in_have_them() -> None:
    for key, section in FEATURE_KEYS.items():
        if section is not None:
            assert hasattr(getattr(SMALLEST, section), key), f"{section} has no {key}"


def _readers(key: str, section: str | None) -> set[str]:
    """Files that read a key of the configuration, by its section, `config`, or a name for one of
    these.

    Left out are config/, planning/ and algorithm/, whose subject is the configuration itself: one
    says what it means, another compares what its keys would bring, and the third is what the others
    ask instead of the keys.
    """
    own = section or "config"
    kind = type(getattr(SMALLEST, section)).__name__ if section else "Config"
    actual: set[str] = set()
    for file in modules().values():
        path = file.relative_to(PACKAGE).as_posix()
        if path.startswith(("config/", "planning/", "algorithm/")) or path == OWN.get(key):
            continue
        text = file.read_text()
        if key not in text:
            continue
        tree = ast.parse(text)
        aliases, wanted = set(), {own}  # names of variables, and of attributes
        for node in ast.walk(tree):
            for target, value in _pairs(node) if isinstance(node, ast.Assign) else ():
                if isinstance(value, ast.Attribute) and value.attr.lstrip("_") == own:
                    aliases |= {target.id} if isinstance(target, ast.Name) else set()
                    wanted |= (
                        {target.attr.lstrip("_")} if isinstance(target, ast.Attribute) else set()
                    )
            if isinstance(node, ast.arg) and kind in getattr(node.annotation, "id", "").split():
                aliases.add(node.arg)
        for node in ast.walk(tree):
            if section is None and _called_name(node) == key:
                actual.add(path)
            if isinstance(node, ast.Attribute) and node.attr == key:
                base = node.value
                name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                if name.lstrip("_") in wanted or (isinstance(base, ast.Name) and name in aliases):
                    actual.add(path)
    return actual


def _called_name(node: ast.AST) -> str:
    """Returns the name of the function that a call calls by its plain name, or an empty string."""
    return getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""


def _pairs(node: ast.Assign) -> Iterable[tuple[ast.expr, ast.expr]]:
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        return zip(target.elts, node.value.elts, strict=True)
    return [(target, node.value)]


@pytest.mark.parametrize("key", FEATURE_KEYS)
def test_a_features_keys_are_read_in_few_files(key: str) -> None:
    """Elsewhere a feature is a value or an object that was made from its keys."""
    readers = _readers(key, FEATURE_KEYS[key])
    most, why = MANY_READERS.get(key, (MOST_READERS, ""))
    assert len(readers) <= most, f"{key} is read in {sorted(readers)}; pass on what follows from it"
    assert not why or len(readers) > MOST_READERS, (
        f"{key} is read in {len(readers)} files: take it out of MANY_READERS"
    )
