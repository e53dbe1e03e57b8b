"""Column declares one value for every token of a sample; RunColumns are the columns of a run.

    environment, engine ──> Sample ──> Group ──> wire, buffer ──> Microbatch ──> loss, model
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

Filler = Literal["environment", "engine", "row", "teacher", "coordinator", "trainers"]
_FILLERS: dict[Filler, str] = {
    "environment": "the environment (environment.name) must give it to SampleBuilder",
    "engine": "the engine (rollout.backend) must return it with every response",
    "row": "the coordinator must take it from the row of data",
    "teacher": "the teacher's engine or server must score every sample",
    "coordinator": "the coordinator must make it of the group",
    "trainers": "trainers must make it of the group",
}
# What travels: name in numpy to name in safetensors.
STORED = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
STORED_TYPES = {np.dtype(name).newbyteorder("<"): stored for name, stored in STORED.items()}


class GroupFormatError(PaNpuError):
    """A group's bytes or arrays break a rule; the message names the field and the values."""


@dataclass(frozen=True)
class Column:
    """A declared column: an array [tokens, *shape] beside a sample's tokens.

    dtype: numpy's name. filled_by: who gives the values.
    read_by: the feature that reads them, for messages.
    tokens: which tokens have a value. "trained": trained tokens alone; nothing travels for others.
    "all": all tokens, those of prompts and environments too. "context": all tokens, whose values
    follow from the tokens before them. An engine returns these from the sequence's first token on,
    and a shared beginning has them once.
    elsewhere: the value of tokens that got none.
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
        """The type in numpy, little endian, as the column travels."""
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def is_float(self) -> bool:
        return self.type.kind == "f"

    def blank(self, num_tokens: int) -> np.ndarray:
        return np.full((num_tokens, *self.shape), self.elsewhere, self.type)

    def where_blank(self, values: np.ndarray) -> np.ndarray:
        """Returns bool [tokens, 1, ...]: True for tokens that have no value."""
        blank: np.ndarray = (values == self.elsewhere).all(
            axis=tuple(range(1, values.ndim)), keepdims=True
        )
        return blank

    def continued(self, so_far: np.ndarray, added: np.ndarray) -> np.ndarray:
        """Returns the column of a sequence that was continued.

        added: values of the new tokens. A column of context has values of the whole sequence here,
        which fill what `so_far` lacks.
        """
        if self.tokens != "context":
            return np.concatenate([so_far, added])
        filled = np.where(self.where_blank(so_far), added[: len(so_far)], so_far)
        return np.concatenate([filled, added[len(so_far) :]])

    def check_declaration(self, other_names: Collection[str]) -> None:
        """Raises ConfigError if no run can have this column. other_names: of other columns."""
        problem = None
        if not self.name.isidentifier() or self.name in other_names:
            problem = "its name must be an identifier that no other column has"
        elif self.dtype not in STORED:
            problem = f"its dtype {self.dtype} must be one of {', '.join(STORED)}"
        elif any(size < 1 for size in self.shape):
            problem = f"its shape {self.shape} must have sizes of at least 1"
        elif (self.make is not None) != (self.filled_by in ("coordinator", "trainers")):
            problem = (
                "filled_by must be coordinator or trainers with `make`, and environment, "
                "engine, row or teacher without"
            )
        if problem is not None:
            raise ConfigError(
                f"column {self.name}, which {self.read_by} reads: {problem}; correct its "
                "declaration"
            )


TOKENS = Column("tokens", "int32", read_by="the model", tokens="all")
COMPONENT = Column("component", "uint8", read_by="the loss", tokens="all")
"""The component of the loss that trains the token: Component.number of the run's algorithm, where 1
is the leading one; 0 for tokens that are not trained.
"""
WEIGHT = Column("weight", "float32", read_by="the loss", elsewhere=1)
"""The weight of a trained token; a group has the column only if some weight is not 1."""
LOGPROBS = Column("logprobs", "float32", filled_by="engine", read_by="the loss")
VERSIONS = Column("versions", "int32", filled_by="engine", read_by="I1", elsewhere=NO_VERSION)
"""Provenance: the version of the weights with which the policy wrote the token.

A token that it did not write has NO_VERSION and no log-prob.
"""
ADVANTAGES = Column("advantages", "float32", filled_by="coordinator", read_by="the loss")
FIXED = (TOKENS, COMPONENT, LOGPROBS, VERSIONS, ADVANTAGES)
"""The columns of every run.

They are attributes of Sample and Group. What is the same along a run of tokens travels once per
run.
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


def continued(so_far: Values, added: Values) -> dict[Column, np.ndarray]:
    """Returns the columns of a sequence that was continued (Column.continued); `so_far` is empty
    for the sequence's first part.
    """
    if not so_far:
        return dict(added)
    return {column: column.continued(so_far[column], values) for column, values in added.items()}


@dataclass(frozen=True)
class RunColumns:
    """The declared columns of a run.

    reads: names of the columns that a task reads; None means all of them.

    Raises ConfigError for a declaration that no run can have.
    """

    declared: tuple[Column, ...] = ()
    reads: frozenset[str] | None = None

    def __post_init__(self) -> None:
        names = {column.name for column in FIXED} | RESERVED
        for column in self.declared:
            # who makes advantages may declare them again, and nobody else a fixed column
            is_advantages = column == replace(
                ADVANTAGES, make=column.make, filled_by=column.filled_by
            )
            column.check_declaration(names - {column.name} if is_advantages else names)
            names.add(column.name)
        unknown = (self.reads or frozenset()) - names
        if unknown:
            raise ConfigError(
                f"a task reads {sorted(unknown)}, which no feature of this run declares"
            )

    @classmethod
    def from_features(cls, features: Iterable[Any]) -> RunColumns:
        """Collects the columns that functions or classes declare by their attribute `columns`; two
        may declare the same one.
        """
        columns: list[Column] = []
        for feature in features:
            columns += getattr(feature, "columns", ())
        return cls.from_columns(columns)

    @classmethod
    def from_columns(cls, columns: Iterable[Column]) -> RunColumns:
        """Makes the columns of a run; the same column may come several times."""
        return cls(tuple(dict.fromkeys(columns)))

    def reading(self, names: Iterable[str]) -> RunColumns:
        """Returns the same columns for a task that reads those of these names and no others.
        `logprobs` and `advantages` are named like all others.
        """
        return replace(self, reads=frozenset(names))

    @cached_property
    def carried(self) -> tuple[Column, ...]:
        """The declared columns that travel from coordinator to trainers."""
        return tuple(
            column
            for column in self.declared
            if column.filled_by != "trainers" and column.name != ADVANTAGES.name
        )

    def wants(self, column: Column) -> bool:
        return self.reads is None or column.name in self.reads

    def named(self, name: str, origin: str) -> Column:
        """Returns the declared column of a name that arrived.

        origin: where the name was read, for messages. Raises GroupFormatError for an unknown name.
        """
        for column in (LOGPROBS, *self.carried):
            if column.name == name:
                return column
        declared = ", ".join(column.name for column in self.carried) or "none"
        raise GroupFormatError(
            f"{origin}: column {name} is unknown, no feature of this run reads it (declared: "
            f"{declared}); remove it, or let the feature that reads it declare it"
        )

    def check(self, columns: Collection[Column], origin: str) -> None:
        """Raises GroupFormatError for an unknown column, and for one that should travel and does
        not.

        columns: the group's, LOGPROBS among them. origin: whose they are, for messages.
        """
        for column in columns:
            if column is LOGPROBS or column in self.carried:
                continue
            if self.named(column.name, origin) != column:
                raise GroupFormatError(
                    f"{origin}: column {column.name} differs from its declaration; import that one"
                )
        for column in (LOGPROBS, *self.carried):
            if column not in columns and self.wants(column):
                raise GroupFormatError(
                    f"{origin}: column {column.name}, which {column.read_by or 'a feature'} reads, "
                    f"is missing; {_FILLERS[column.filled_by]}"
                )

    def makers(self, by: Filler) -> Mapping[Column, Callable[[Group], np.ndarray]]:
        """Returns the columns that this process makes from whole groups, each with the function
        that makes it. ADVANTAGES is among them if a feature declares it with `make`.
        """
        makers = {}
        for column in self.declared:
            if column.make and column.filled_by == by and self.wants(column):
                makers[column] = column.make
        return makers


NONE = RunColumns()
