"""Config: the whole configuration, with presets filled in and rules between keys checked.

Keys are in `pa_npu.config.sections`, with what follows from the keys of one section. What follows
from several sections is in `mesh`, `devices` and `deadlines`, or with the feature that uses it. Rules
between keys in `pa_npu.config.rules`. Rules that need the model, the disk or devices are in
`pa_npu.launcher.run_checks`. This room imports nothing heavier than pydantic, so that a
configuration loads quickly in every process.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from pa_npu.config.presets import fill_preset
from pa_npu.config.rules import broken_rules
from pa_npu.config.tree import ConfigTree


class Config(ConfigTree):
    """A configuration that satisfies all rules.

    Raises pydantic's ValidationError with the first rule that is broken.
    """

    @model_validator(mode="before")
    @classmethod
    def fill_preset(cls, tree: Any) -> Any:
        """Fills the keys of algorithm.name's preset that the user left unset."""
        return fill_preset(tree)

    @model_validator(mode="after")
    def check_rules(self) -> Config:
        """Checks the rules between keys. A message names keys, values, rule and remedy."""
        for broken in broken_rules(self):
            raise ValueError(broken)
        return self
