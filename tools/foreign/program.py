"""Reads the keyword arguments of GRPOConfig(...), GRPOTrainer(...) and LoraConfig(...) from a program of TRL, without running it.

Literals, arithmetic on them and names that are assigned one literal are followed; so are the
model's and the dataset's path in from_pretrained(...) and load_dataset(...). RLOO, online DPO,
SFTTrainer, DPOTrainer and GKDTrainer are read in the same way, and adapters of Unsloth's
get_peft_model(...). Whatever else an argument is, is named.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from pa_npu.errors import ConfigError
from tools.foreign.script import Arguments

_POSITIONAL = {
    "Config": ("output_dir",),
    "Trainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
}
# whose configuration and trainer are translated
_ALGORITHMS = ("AsyncGRPO", "GRPO", "RLOO", "OnlineDPO", "GKD", "SFT", "DPO")
_ADAPTERS = ("LoraConfig", "get_peft_model")  # peft's, and Unsloth's function of keyword arguments
_RANK = "r"
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
    """Returns the arguments of the one trainer in the program.

    Raises ConfigError where there is none, or more than one configuration.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text)
        return _Program(tree).arguments(where)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(
            f"{where}{line}: not a Python program ({type(error).__name__}); give TRL's training "
            "program"
        ) from None


class _Program:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.assigned: dict[str, list[ast.expr]] = {}  # by name, and by name.attribute
        self.functions = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }
        for node in ast.walk(tree):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            value = getattr(node, "value", None)
            targets = [
                part
                for target in targets
                for part in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
            for target in targets:
                if isinstance(target, (ast.Name, ast.Attribute)):
                    computed = (
                        ast.Constant(...)
                        if value is None or isinstance(node, ast.AugAssign)
                        else value
                    )
                    self.assigned.setdefault(ast.unparse(target), []).append(computed)

    def arguments(self, where: str) -> Arguments:
        arguments = Arguments()
        algorithm = self._algorithm(where)
        configs, trainers = (list(self._calls(f"{algorithm}{kind}")) for kind in _POSITIONAL)
        if len(configs) > 1 or len(trainers) > 1:
            lines = ", ".join(
                str(call.lineno) for call in (configs if len(configs) > 1 else trainers)
            )
            raise ConfigError(
                f"{where}: several of them, at lines {lines}; give a program with one "
                f"{algorithm}Config and one {algorithm}Trainer"
            )
        if not configs:
            raise ConfigError(
                f"{where}: no {algorithm}Config(...) is called in it; where its values come from a "
                "file or a command line, give that file, or the script with that line"
            )
        if algorithm != "GRPO":
            arguments.values["trainer"] = algorithm
        for name, value in self._keywords(trainers[0], "Trainer") if trainers else ():
            if name == "peft_config":
                continue
            if name not in _HOLDERS:
                self._give(
                    arguments, {"model": "model_name_or_path", **_DATASETS}.get(name, name), value
                )
        for name, value in [*self._keywords(configs[0], "Config"), *self._later(configs[0])]:
            self._give(arguments, name, value)
        self._adapters(arguments, trainers)
        return arguments

    def _algorithm(self, where: str) -> str:
        """Returns which of TRL's algorithms the program trains with.

        Raises ConfigError for one that is not translated.
        """
        names = [
            ast.unparse(node.func).rpartition(".")[2]
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
        ]
        for algorithm in _ALGORITHMS:
            if f"{algorithm}Config" in names or f"{algorithm}Trainer" in names:
                return algorithm
        derived = [name for name in names if name.endswith(("GRPOConfig", "GRPOTrainer"))]
        unknown_trainer = next(
            (
                name
                for name in names
                if re.fullmatch(r"[A-Z]\w*(?:Trainer|Config)", name) and "Trainer" in name
            ),
            None,
        )
        if unknown_trainer is not None and not derived:
            raise ConfigError(
                f"{where}: {unknown_trainer} does not train as this project does; programs of "
                f"{', '.join(f'{name}Trainer' for name in _ALGORITHMS)} are translated"
            )
        return "GRPO"

    def _adapters(self, arguments: Arguments, trainers: list[ast.Call]) -> None:
        """Gives the settings of LoRA, from LoraConfig(...) or from get_peft_model(model, r=...)."""
        config = next(
            (
                keyword.value
                for call in trainers
                for keyword in call.keywords
                if keyword.arg == "peft_config"
            ),
            None,
        )
        calls = [call for name in _ADAPTERS for call in self._calls(name)]
        # get_peft_model(model, LoraConfig(...)) says nothing besides
        calls = [
            call for call in calls if call.keywords or ast.unparse(call.func).endswith(_ADAPTERS[0])
        ]
        if len(calls) == 1:
            for keyword in calls[0].keywords:
                if keyword.arg is not None:
                    self._give(arguments, f"peft_config.{keyword.arg}", keyword.value)
            arguments.values.setdefault(f"peft_config.{_RANK}", 8)
        elif config is not None and not (isinstance(config, ast.Constant) and config.value is None):
            self._give(arguments, "peft_config", config)

    def _calls(self, name: str) -> Iterator[ast.Call]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].endswith(
                name
            ):
                yield node

    def _keywords(self, call: ast.Call, name: str) -> Iterator[tuple[str, ast.expr]]:
        yield from zip(_POSITIONAL[name], call.args, strict=False)
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
                continue
            several = self._followed(keyword.value)
            if isinstance(several, ast.Dict) and all(
                isinstance(key, ast.Constant) for key in several.keys
            ):
                for key, value in zip(several.keys, several.values, strict=True):
                    assert isinstance(key, ast.Constant)
                    yield str(key.value), value
            else:
                yield f"**{ast.unparse(keyword.value)[:40]}", keyword.value

    def _later(self, config: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Finds the values assigned to attributes of the configuration after its making."""
        names = [name for name, values in self.assigned.items() if config in values]
        for target, values in self.assigned.items():
            holder, _, attribute = target.rpartition(".")
            if holder in names:
                yield attribute, values[0] if len(values) == 1 else ast.Name(target)

    def _give(self, arguments: Arguments, name: str, node: ast.expr) -> None:
        arguments.values.pop(name, None)
        try:
            if name == "reward_funcs":
                arguments.values[name] = self._functions(node)
            elif name == "model_name_or_path":
                arguments.values[name] = self._literal(self._loaded(node))
            else:
                arguments.values[name] = (
                    self._file(node) if name in _DATASETS.values() else self._literal(node)
                )
        except _NotLiteral as error:
            arguments.unread[name] = f"{ast.unparse(node)[:60]}: {error}"
        except RecursionError:
            arguments.unread[name] = f"{ast.unparse(node)[:60]}: refers to itself"

    def _functions(self, node: ast.expr) -> list[str]:
        """Names of reward functions: of this program, of TRL, or a text."""
        node = self._followed(node)
        names = []
        for item in node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]:
            if isinstance(item, ast.Call):
                item = item.func  # get_soft_overlong_punishment(...)
            if isinstance(item, (ast.Name, ast.Attribute)):
                names.append(ast.unparse(item))
            else:
                names.append(str(self._literal(item)))
        return names

    def _followed(self, node: ast.expr) -> ast.expr:
        """Finds the value of a name that is assigned once."""
        for _ in range(20):
            if not isinstance(node, ast.Name) or len(self.assigned.get(node.id, ())) != 1:
                break
            (node,) = self.assigned[node.id]
        return node

    def _loaded(self, node: ast.expr) -> ast.expr:
        """Finds the from_pretrained(...) of a model that is wrapped afterwards: model =
        get_peft_model(model, ...).
        """
        assigned = self.assigned.get(node.id, ()) if isinstance(node, ast.Name) else ()
        loads = [
            value
            for value in assigned
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith(".from_pretrained")
        ]
        return loads[0] if len(assigned) > 1 and len(loads) == 1 else node

    def _file(self, node: ast.expr) -> Any:
        """Returns the file, or the name on a hub, that load_dataset(...) reads, whatever is done
        with its rows; or the name itself.
        """
        if isinstance(named := self._followed(node), ast.Constant) and isinstance(named.value, str):
            return named.value
        call = self._loading(node, 20)
        if call is None:
            raise _NotLiteral(
                "a dataset that the program makes; write its rows to a file and name that one"
            )
        files = next(
            (keyword.value for keyword in call.keywords if keyword.arg == "data_files"),
            call.args[0],
        )
        return self._literal(files)

    def _loading(self, node: ast.expr, depth: int) -> ast.Call | None:
        """Returns the call of load_dataset(...) that a dataset is made of: by methods, splits and
        names that are assigned anew.
        """
        if depth == 0:
            return None
        if isinstance(node, ast.Subscript):  # dataset["train"]
            return self._loading(node.value, depth - 1)
        if isinstance(node, ast.Name):
            loads = [
                self._loading(value, depth - 1)
                for value in self.assigned.get(node.id, ())
                if not self._is_of(value, node.id)
            ]
            return loads[0] if len(loads) == 1 else None
        if not isinstance(node, ast.Call):
            return None
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "load_dataset" and node.args:
            return node
        if isinstance(node.func, ast.Attribute):  # dataset.map(...)
            return self._loading(node.func.value, depth - 1)
        if name in self.functions and depth > 1:  # get_dataset(), which returns one
            returned = [
                inner.value
                for inner in ast.walk(self.functions[name])
                if isinstance(inner, ast.Return) and inner.value
            ]
            return self._loading(returned[0], depth - 1) if len(returned) == 1 else None
        return None

    def _is_of(self, value: ast.expr, name: str) -> bool:
        """Returns whether a value is the named one after some methods: dataset = dataset.map(...)."""
        while isinstance(value, (ast.Call, ast.Attribute, ast.Subscript)):
            value = value.func if isinstance(value, ast.Call) else value.value
        return isinstance(value, ast.Name) and value.id == name

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
                return self._arithmetic(
                    _OPERATORS[type(node.op)], self._literal(node.left), self._literal(node.right)
                )
            case ast.JoinedStr():
                return "".join(str(self._literal(part)) for part in node.values)
            case ast.FormattedValue(format_spec=None):
                return self._literal(node.value)
            case ast.Attribute() if node.attr in _TYPES:
                return node.attr  # torch.bfloat16
            case ast.Call(args=[first, *_]) if ast.unparse(node.func).endswith(".from_pretrained"):
                return self._literal(first)
            case ast.Call() if ast.unparse(node.func).endswith(".from_pretrained"):
                named = [
                    word.value
                    for word in node.keywords
                    if word.arg in ("model_name", "pretrained_model_name_or_path")
                ]
                if named:
                    return self._literal(named[0])
            case ast.Call(args=[], func=ast.Name("dict")) if all(
                word.arg for word in node.keywords
            ):
                return {word.arg: self._literal(word.value) for word in node.keywords}
        line = f"line {node.lineno}: " if hasattr(node, "lineno") else ""
        if isinstance(node, ast.Name) and len(self.assigned.get(node.id, ())) > 1:
            raise _NotLiteral(
                f"{line}assigned more than once; it cannot be read without running the program"
            )
        raise _NotLiteral(f"{line}no literal; it cannot be read without running the program")

    def _arithmetic(self, calculate: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        texts = calculate is operator.add and isinstance(left, str) and isinstance(right, str)
        if not texts and not all(
            isinstance(value, (int, float)) and abs(value) < 1e12 for value in (left, right)
        ):
            raise _NotLiteral("no arithmetic of numbers")
        try:
            return calculate(left, right)
        except ZeroDivisionError:
            raise _NotLiteral("divides by zero") from None
