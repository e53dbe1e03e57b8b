"""Column: one value for every token of a sample, declared where the feature that needs it lives; RunColumns: those of a run.

    environment, engine ──> Sample ──> Group ──> wire, buffer ──> Microbatch ──> a loss, a model
                     coordinator makes ──┘  trainers make ──┘

A feature declares a column by an attribute `columns` of the function or class that reads it.
Everything between who fills a column and who reads it carries it without knowing it; the fixed
columns below take the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pa_npu.errors import ConfigError, PaNpuError

if TYPE_CHECKING:
    from pa_npu.samples.group import Group

NO_VERSION = -1
"""Version of a token that no policy generated."""

Filler = Literal["environment", "engine", "row", "coordinator", "trainers"]
_FILLERS: dict[Filler, str] = {
    "environment": "the environment (environment.name) must give it to SampleBuilder",
    "engine": "the engine (rollout.backend) must return it with every response",
    "row": "the coordinator must take it from the row of data",
    "coordinator": "the coordinator must make it of the group",
    "trainers": "trainers must make it of the group",
}
# What travels: name in numpy to name in safetensors.
STORED = {
    **{
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "int16": "I16",
        "uint16": "U16",
        "int32": "I32",
        "uint32": "U32",
    },
    **{"int64": "I64", "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64"},
}
STORED_TYPES = {np.dtype(name).newbyteorder("<"): stored for name, stored in STORED.items()}


class GroupFormatError(PaNpuError):
    """A group's bytes or arrays break a rule; the message names the field and the values."""


@dataclass(frozen=True)
class Column:
    """A declared column: an array [tokens, *shape] beside a sample's tokens.

    dtype: numpy's name. filled_by: who gives the values. read_by: the feature that reads them, for
    messages.
    tokens: "trained" ones have a value and it travels for these alone; or "all" do, a prompt's and
    an environment's too. So do those of "context", which an engine gives of all that it was given
    too, from the sequence's first token on: they follow from the tokens, and a shared beginning has
    them once.
    elsewhere: the value of tokens that nobody gave one.
    make: computes the array from the whole group, in the process that `filled_by` names:
    coordinator or trainers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    filled_by: Filler = "environment"
    read_by: str = ""
    tokens: Literal["trained", "all", "context"] = "trained"
    elsewhere: float = 0
    make: Callable[[Group], np.ndarray] | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def type(self) -> np.dtype[Any]:
        """Little endian, as it travels."""
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def is_float(self) -> bool:
        return self.type.kind == "f"

    def blank(self, num_tokens: int) -> np.ndarray:
        return np.full((num_tokens, *self.shape), self.elsewhere, self.type)

    def where_blank(self, values: np.ndarray) -> np.ndarray:
        """bool [tokens, 1, ...]: which have no value."""
        blank: np.ndarray = (values == self.elsewhere).all(
            axis=tuple(range(1, values.ndim)), keepdims=True
        )
        return blank

    def continued(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """The column of a sequence that goes on. after: of what follows; of context, of all of it,
        it fills what `before` lacks.
        """
        if self.tokens != "context":
            return np.concatenate([before, after])
        known = np.where(self.where_blank(before), after[: len(before)], before)
        return np.concatenate([known, after[len(before) :]])

    def check_declaration(self, taken: Collection[str]) -> None:
        """Raises ConfigError where no run can have this column. taken: names of others."""
        problem = None
        if not self.name.isidentifier() or self.name in taken:
            problem = "its name must be an identifier that no other column has"
        elif self.dtype not in STORED:
            problem = f"its dtype {self.dtype} must be one of {', '.join(STORED)}"
        elif any(size < 1 for size in self.shape):
            problem = f"its shape {self.shape} must have sizes of at least 1"
        elif (self.make is not None) != (self.filled_by in ("coordinator", "trainers")):
            problem = (
                "filled_by must be coordinator or trainers with `make`, and environment, "
                "engine or row without"
            )
        if problem is not None:
            raise ConfigError(
                f"column {self.name}, which {self.read_by} reads: {problem}; correct its "
                "declaration"
            )


TOKENS = Column("tokens", "int32", read_by="the model", tokens="all")
COMPONENT = Column("component", "uint8", read_by="the loss", tokens="all")
"""Of the loss, that trains the token: Component.number of the run's algorithm, of which 1 leads; 0:
not trained.
"""
WEIGHT = Column("weight", "float32", read_by="the loss", elsewhere=1)
"""Of a trained token; a group has it only where one is not 1."""
LOGPROBS = Column("logprobs", "float32", filled_by="engine", read_by="the loss")
VERSIONS = Column("versions", "int32", filled_by="engine", read_by="I1", elsewhere=NO_VERSION)
"""Provenance: the weights by which the policy wrote the token.

A token that it did not write has NO_VERSION, and no log-prob.
"""
ADVANTAGES = Column("advantages", "float32", filled_by="coordinator", read_by="the loss")
FIXED = (TOKENS, COMPONENT, LOGPROBS, VERSIONS, ADVANTAGES)
"""The columns of every run.

They are attributes of Sample and Group; what follows from runs of tokens travels once per run.
"""

RESERVED = {
    "weight",
    "trained",
    "written",
    "components",
    "numbers",
    "spans",
    "values",
    "lengths",
    "rewards",
    "finished",
    "placeholders",
    "attachments",
    "digests",
}
"""Further names that stand for something else in a group, on the wire or in a microbatch."""

Values = Mapping[Column, np.ndarray]


def continued(before: Values, after: Values) -> dict[Column, np.ndarray]:
    """The columns of a sequence that goes on, see Column.continued; `before` has none where nothing
    came before.
    """
    return {
        column: column.continued(before[column], values) if before else values
        for column, values in after.items()
    }


@dataclass(frozen=True)
class RunColumns:
    """The declared columns of a run, and of these the ones that a task reads: all of them where
    `reads` is None.

    Raises ConfigError for a declaration that no run can have.
    """

    declared: tuple[Column, ...] = ()
    reads: frozenset[str] | None = None

    def __post_init__(self) -> None:
        taken = {column.name for column in FIXED} | RESERVED
        for column in self.declared:
            is_advantages = column == replace(
                ADVANTAGES, make=column.make, filled_by=column.filled_by
            )
            column.check_declaration(taken - {column.name} if is_advantages else taken)
            taken.add(column.name)
        if unknown := (self.reads or frozenset()) - taken:
            raise ConfigError(
                f"a task reads {sorted(unknown)}, which no feature of this run declares"
            )

    @classmethod
    def of_features(cls, features: Iterable[Any]) -> RunColumns:
        """Collects the columns that functions or classes declare by their attribute `columns`; two
        may declare the same one.
        """
        return cls.of_columns(
            column for feature in features for column in getattr(feature, "columns", ())
        )

    @classmethod
    def of_columns(cls, columns: Iterable[Column]) -> RunColumns:
        """These columns, of which two may be the same one."""
        return cls(tuple(dict.fromkeys(columns)))

    def reading(self, names: Iterable[str]) -> RunColumns:
        """The same for a task that reads the columns of these names, `logprobs` and `advantages`
        among them, and no others.
        """
        return replace(self, reads=frozenset(names))

    @cached_property
    def carried(self) -> tuple[Column, ...]:
        """The declared columns that travel from coordinator to trainers."""
        return tuple(
            one
            for one in self.declared
            if one.filled_by != "trainers" and one.name != ADVANTAGES.name
        )

    def wants(self, column: Column) -> bool:
        return self.reads is None or column.name in self.reads

    def named(self, name: str, what: str) -> Column:
        """The declared column of a name that arrives.

        Raises GroupFormatError for an unknown one.
        """
        for column in (LOGPROBS, *self.carried):
            if column.name == name:
                return column
        known = ", ".join(column.name for column in self.carried) or "none"
        raise GroupFormatError(
            f"{what}: column {name} is unknown, no feature of this run reads it (declared: "
            f"{known}); remove it, or let the feature that reads it declare it"
        )

    def check(self, found: Collection[Column], what: str) -> None:
        """Raises GroupFormatError for an unknown column, and for one that should travel and does
        not.

        found: LOGPROBS among them.
        """
        for column in found:
            if (
                column is not LOGPROBS
                and column not in self.carried
                and self.named(column.name, what) != column
            ):
                raise GroupFormatError(
                    f"{what}: column {column.name} differs from its declaration; import that one"
                )
        for column in (LOGPROBS, *self.carried):
            if column not in found and self.wants(column):
                raise GroupFormatError(
                    f"{what}: column {column.name}, which {column.read_by or 'a feature'} reads, "
                    f"is missing; {_FILLERS[column.filled_by]}"
                )

    def makers(self, by: Filler) -> Mapping[Column, Callable[[Group], np.ndarray]]:
        """The columns that this process makes from whole groups, ADVANTAGES among them if a feature
        declares it with `make`.
        """
        return {
            one: one.make
            for one in self.declared
            if one.make and one.filled_by == by and self.wants(one)
        }


NONE = RunColumns()
