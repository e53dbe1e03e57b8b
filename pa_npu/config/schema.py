"""Config: the tree of the configuration with what is filled in before its keys are read and the rules that are checked after.

The keys are in `pa_npu.config.sections`, what follows from several of them in `pa_npu.config.tree`,
rules between keys in `pa_npu.config.rules`; rules that need the model, the disk or devices are in
`pa_npu.launcher.run_checks`. None of them imports anything heavier than pydantic, so that a
configuration loads quickly in every process.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from pa_npu.config.presets import fill_preset
from pa_npu.config.rules import broken_rules
from pa_npu.config.tree import ConfigTree


class Config(ConfigTree):
    """A configuration that keeps all rules.

    Raises pydantic's ValidationError with the first that is broken.
    """

    @model_validator(mode="before")
    @classmethod
    def fill_preset(cls, tree: Any) -> Any:
        """The keys of algorithm.name's preset that the user left unset."""
        return fill_preset(tree)

    @model_validator(mode="after")
    def check_rules(self) -> Config:
        """Rules between keys.

        Each message names the keys, their values, the rule and the remedy.
        """
        for broken in broken_rules(self):
            raise ValueError(broken)
        return self
