"""Reads the keyword arguments of GRPOConfig(...) and GRPOTrainer(...) from a training program of TRL, without running it.

Literals, arithmetic on them and names that are assigned one literal are followed; so are the model's and the dataset's path in
from_pretrained(...) and load_dataset(...). Whatever else an argument is, is named.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from pa_npu.errors import ConfigError
from tools.foreign.script import Arguments

_POSITIONAL = {
    "GRPOConfig": ("output_dir",),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
}
_HOLDERS = ("args", "config")  # arguments of the trainer that hold the configuration
_DATASETS = {"train_dataset": "dataset_name", "eval_dataset": "eval_dataset"}
_TYPES = ("bfloat16", "float32", "float16")
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class _NotLiteral(Exception):
    """The message says what it is instead."""


def read_program(text: str, where: str) -> Arguments:
    """The arguments of the one trainer in the program. Raises ConfigError where there is none, or more than one configuration."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text)
        return _Program(tree).arguments(where)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(
            f"{where}{line}: not a Python program ({type(error).__name__}); give TRL's training program"
        ) from None


class _Program:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.assigned: dict[str, list[ast.expr]] = {}  # by name, and by name.attribute
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            for target in targets:
                if isinstance(target, (ast.Name, ast.Attribute)):
                    computed = ast.Constant(...) if value is None or isinstance(node, ast.AugAssign) else value
                    self.assigned.setdefault(ast.unparse(target), []).append(computed)

    def arguments(self, where: str) -> Arguments:
        given = Arguments()
        configs, trainers = (list(self._calls(name)) for name in _POSITIONAL)
        if len(configs) > 1 or len(trainers) > 1:
            lines = ", ".join(str(call.lineno) for call in (configs if len(configs) > 1 else trainers))
            raise ConfigError(
                f"{where}: several of them, at lines {lines}; give a program with one GRPOConfig and one GRPOTrainer"
            )
        if not configs:
            raise ConfigError(
                f"{where}: no GRPOConfig(...) is called in it; where its values come from a file or a command line, give that "
                "file, or the script with that line"
            )
        for name, value in self._keywords(trainers[0], "GRPOTrainer") if trainers else ():
            if name not in _HOLDERS:
                self._give(given, {"model": "model_name_or_path", **_DATASETS}.get(name, name), value)
        for name, value in [*self._keywords(configs[0], "GRPOConfig"), *self._later(configs[0])]:
            self._give(given, name, value)
        return given

    def _calls(self, name: str) -> Iterator[ast.Call]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].endswith(name):
                yield node

    def _keywords(self, call: ast.Call, name: str) -> Iterator[tuple[str, ast.expr]]:
        yield from zip(_POSITIONAL[name], call.args, strict=False)
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
                continue
            several = self._followed(keyword.value)
            if isinstance(several, ast.Dict) and all(isinstance(key, ast.Constant) for key in several.keys):
                yield from ((str(key.value), value) for key, value in zip(several.keys, several.values, strict=True))  # type: ignore[union-attr]
            else:
                yield f"**{ast.unparse(keyword.value)[:40]}", keyword.value

    def _later(self, config: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Finds the values assigned to attributes of the configuration after its making."""
        names = [name for name, values in self.assigned.items() if config in values]
        for target, values in self.assigned.items():
            holder, _, attribute = target.rpartition(".")
            if holder in names:
                yield attribute, values[0] if len(values) == 1 else ast.Name(target)

    def _give(self, given: Arguments, name: str, node: ast.expr) -> None:
        given.values.pop(name, None)
        try:
            given.values[name] = self._file(node) if name in _DATASETS.values() else self._literal(node)
        except _NotLiteral as error:
            given.unread[name] = f"{ast.unparse(node)[:60]}: {error}"
        except RecursionError:
            given.unread[name] = f"{ast.unparse(node)[:60]}: refers to itself"

    def _followed(self, node: ast.expr) -> ast.expr:
        """Finds the value of a name that is assigned once."""
        for _ in range(20):
            if not isinstance(node, ast.Name) or len(self.assigned.get(node.id, ())) != 1:
                break
            (node,) = self.assigned[node.id]
        return node

    def _file(self, node: ast.expr) -> Any:
        """The file, or the name on a hub, that load_dataset(...) reads; or the dataset's name itself."""
        node = self._followed(node)
        if isinstance(node, ast.Subscript):
            node = self._followed(node.value)  # dataset["train"]
        if not (
            isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "load_dataset" and node.args
        ):
            raise _NotLiteral("a dataset that the program makes; write its rows to a file and name that one")
        files = next((keyword.value for keyword in node.keywords if keyword.arg == "data_files"), node.args[0])
        return self._literal(files)

    def _literal(self, node: ast.expr) -> Any:
        node = self._followed(node)
        match node:
            case ast.Constant() if node.value is not ...:
                return node.value
            case ast.List() | ast.Tuple():
                return [self._literal(item) for item in node.elts]
            case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
                return {
                    ast.literal_eval(key): self._literal(item)
                    for key, item in zip(node.keys, node.values, strict=True)
                    if key
                }
            case ast.UnaryOp(op=ast.USub()):
                return self._arithmetic(operator.sub, 0, self._literal(node.operand))
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return self._arithmetic(_OPERATORS[type(node.op)], self._literal(node.left), self._literal(node.right))
            case ast.JoinedStr():
                return "".join(str(self._literal(part)) for part in node.values)
            case ast.FormattedValue(format_spec=None):
                return self._literal(node.value)
            case ast.Attribute() if node.attr in _TYPES:
                return node.attr  # torch.bfloat16
            case ast.Call(args=[first, *_]) if ast.unparse(node.func).endswith(".from_pretrained"):
                return self._literal(first)
        line = f"line {node.lineno}: " if hasattr(node, "lineno") else ""
        if isinstance(node, ast.Name) and len(self.assigned.get(node.id, ())) > 1:
            raise _NotLiteral(f"{line}assigned more than once; it cannot be read without running the program")
        raise _NotLiteral(f"{line}no literal; it cannot be read without running the program")

    def _arithmetic(self, calculate: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        texts = calculate is operator.add and isinstance(left, str) and isinstance(right, str)
        if not texts and not all(isinstance(value, (int, float)) and abs(value) < 1e12 for value in (left, right)):
            raise _NotLiteral("no arithmetic of numbers")
        try:
            return calculate(left, right)
        except ZeroDivisionError:
            raise _NotLiteral("divides by zero") from None
