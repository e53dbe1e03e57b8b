"""Registry of algorithms: makes the run's Algorithm of its configuration."""

from __future__ import annotations

from pa_npu.algorithm.algorithm import Algorithm
from pa_npu.algorithm.distillation import Distillation
from pa_npu.algorithm.policy_gradient import PolicyGradient
from pa_npu.algorithm.preference_pairs import PreferencePairs
from pa_npu.algorithm.row_preferences import RowPreferences
from pa_npu.algorithm.supervised import Supervised
from pa_npu.config.schema import Config
from pa_npu.config.user_code import import_object
from pa_npu.errors import ConfigError

# By algorithm.loss. A function of the user's own is a policy gradient's.
KINDS: dict[str, type[Algorithm]] = {
    **dict.fromkeys(("clip", "gspo", "cispo", "reinforce"), PolicyGradient),
    "dpo": PreferencePairs,
    "preference": RowPreferences,
    "cross-entropy": Supervised,
}


def build_algorithm(config: Config) -> Algorithm:
    """Makes the algorithm that the configuration names. Cheap: functions of the user's own are
    imported when they are needed first.

    Raises ConfigError where algorithm.name names a class of the user's own that is none.
    """
    if config.algorithm.is_users_own:
        return _users_own(config)
    kind = KINDS.get(config.algorithm.loss, PolicyGradient)
    if kind is PolicyGradient and config.algorithm.distill_coef:
        kind = Distillation
    return kind(config)


def _users_own(config: Config) -> Algorithm:
    name = config.algorithm.name
    assert name is not None, "it is named"
    kind = import_object("algorithm.name", name, "module:Class")
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ConfigError(
            f"algorithm.name: {name} is no class of algorithms; name a subclass of "
            "pa_npu.algorithm.algorithm.Algorithm"
        )
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigError(
            f"algorithm.name: {name} has no {', '.join(missing)}; write what is missing"
        )
    return kind(config)
