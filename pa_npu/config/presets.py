"""Presets of algorithm.name: each fills the keys that the user left unset as a paper sets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pydantic import BaseModel

PresetName = Literal[
    "grpo",
    "dr-grpo",
    "dapo",
    "rloo",
    "reinforce++-baseline",
    "gspo",
    "cispo",
    "critic-free-ppo",
    "online-dpo",
    "sft",
    "dpo",
    "distill",
]


@dataclass(frozen=True)
class Preset:
    """The keys that a paper sets, by section. `source` names the paper."""

    source: str
    algorithm: Mapping[str, Any]
    schedule: Mapping[str, Any] = field(default_factory=dict)
    reward: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)

    def sections(self) -> dict[str, Mapping[str, Any]]:
        return {
            "algorithm": self.algorithm,
            "schedule": self.schedule,
            "reward": self.reward,
            "rollout": self.rollout,
        }

    def keys(self) -> dict[str, Any]:
        """Returns the values by dotted key."""
        dotted = {}
        for section, values in self.sections().items():
            for key, value in values.items():
                dotted[f"{section}.{key}"] = value
        return dotted


def _keys(
    loss: str,
    advantage: str,
    aggregation: str,
    clip: tuple[float, float] | None,
    kl: float,
    **more: Any,
) -> dict[str, Any]:
    """Returns every key that distinguishes the algorithms, so that a changed default cannot change a
    preset. `clip` is (clip_low, clip_high), or None for losses that do not clip.
    """
    keys: dict[str, Any] = {"loss": loss, "advantage": advantage, "aggregation": aggregation}
    if clip is not None:
        keys["clip_low"], keys["clip_high"] = clip
    keys["kl_coef"] = kl
    keys.update(more)
    return keys


PRESETS: dict[PresetName, Preset] = {
    "grpo": Preset(
        "GRPO, arXiv 2402.03300, eq. 3 and 4, with its KL coefficient and PPO's clip range",
        _keys(
            "clip", "group-std", "sequence-mean", (0.2, 0.2), 0.04, kl_estimator="k3", kl_in="loss"
        ),
    ),
    "dr-grpo": Preset(
        "Dr.GRPO, arXiv 2503.20783: neither divided by the deviation nor by the length",
        _keys("clip", "centred", "dr-grpo", (0.2, 0.2), 0.0),
    ),
    "dapo": Preset(
        "DAPO, arXiv 2503.14476, eq. 8 to 13",
        _keys("clip", "group-std", "token-mean", (0.2, 0.28), 0.0),
        schedule={"dynamic_sampling": True},
        reward={"functions": ({"name": "math"}, {"name": "overlong"})},
    ),
    "rloo": Preset(
        "RLOO, arXiv 2402.14740",
        _keys(
            "reinforce",
            "leave-one-out",
            "sequence-sum",
            None,
            0.0,
            kl_estimator="k1",
            kl_in="reward",
        ),
    ),
    "reinforce++-baseline": Preset(
        "REINFORCE++ with baseline, arXiv 2501.03262: centred by the group, scaled by the batch",
        _keys("clip", "batch-std", "token-mean", (0.2, 0.2), 0.0, kl_estimator="k2", kl_in="loss"),
    ),
    "gspo": Preset(
        "GSPO, arXiv 2507.18071, eq. 5 to 7; clip range of section 5.1",
        _keys("gspo", "group-std", "sequence-mean", (3e-4, 4e-4), 0.0),
    ),
    "cispo": Preset(
        "CISPO, arXiv 2506.13585, eq. 4 and 5, no lower clip; weights up to 5, as TRL sets it for "
        "ScaleRL, arXiv 2510.13786",
        _keys("cispo", "group-std", "token-mean", (1.0, 4.0), 0.0),
    ),
    "critic-free-ppo": Preset(
        "PPO, arXiv 1707.06347, eq. 7, with the group's mean reward in place of a value network",
        _keys("clip", "centred", "token-mean", (0.2, 0.2), 0.0),
    ),
    "online-dpo": Preset(
        "Online DPO on the best and the worst response of each group, arXiv 2410.18252, with its "
        "beta",
        {"loss": "dpo", "advantage": "centred", "kl_coef": 0.1},
    ),
    "sft": Preset(
        "Supervised stage: cross-entropy on the marked tokens of rows, mean over all of them, as "
        "in InstructGPT, arXiv 2203.02155, section 3.5",
        {"loss": "cross-entropy", "aggregation": "token-mean"},
        schedule={"order": "prompt"},
        rollout={"engines": 0},
    ),
    "dpo": Preset(
        "DPO on pairs that rows of data give, arXiv 2305.18290, eq. 7, with the beta of its "
        "appendix B",
        {"loss": "preference", "preference_loss": "sigmoid", "kl_coef": 0.1},
        schedule={"order": "prompt"},
        rollout={"engines": 0, "responses_per_prompt": 2},
    ),
    "distill": Preset(
        "On-policy distillation: the reverse KL at the sampled token as its advantage, MiniLLM, "
        "arXiv 2306.08543, eq. 2, and GKD, arXiv 2306.13649, without later tokens' part",
        _keys("clip", "no-reward", "token-mean", (0.2, 0.2), 0.0, distill_coef=1.0),
    ),
}

assert set(PRESETS) == set(get_args(PresetName))


def preset_keys(name: str | None) -> dict[str, Any]:
    """Returns the values of preset `name` by dotted key; an empty dictionary if there is no such
    preset.
    """
    preset = PRESETS.get(name)  # type: ignore[call-overload]
    return {} if preset is None else preset.keys()


def fill_preset(tree: Any) -> Any:
    """Returns the unvalidated configuration tree with the preset's values in keys that are not set.
    Anything but a tree is returned unchanged.
    """
    if not isinstance(tree, dict):
        return tree
    name = set_keys(tree.get("algorithm")).get("name")
    preset = PRESETS.get(name) if isinstance(name, str) else None  # type: ignore[call-overload]
    filled = dict(tree)
    for section, values in preset.sections().items() if preset is not None else ():
        if values and (section not in tree or isinstance(tree[section], dict | BaseModel)):
            filled[section] = {**values, **set_keys(tree.get(section))}
    filled = _with_tasksets(filled)
    reward = tree.get("reward", {})
    if not isinstance(reward, dict | BaseModel):
        return filled
    return _with_scorer_of_made_rows(filled, chosen="functions" in set_keys(reward))


def _with_scorer_of_made_rows(filled: dict[str, Any], chosen: bool) -> dict[str, Any]:
    """Returns the tree with the scorer of reasoning-gym in place of `math`, if data.train names its
    tasks.

    filled: the tree with its preset. chosen: whether the user set reward.functions.
    """
    train = set_keys(filled.get("data")).get("train")
    datasets = train if isinstance(train, (list, tuple)) else [train]
    paths = [set_keys(dataset).get("path", dataset) for dataset in datasets]
    if chosen or not any(str(path).startswith("reasoning_gym:") for path in paths):
        return filled
    reward = set_keys(filled.get("reward"))
    functions = []
    for function in reward.get("functions", ({"name": "math"},)):
        is_math = function["name"] == "math"
        functions.append({**function, "name": "reasoning_gym"} if is_math else function)
    return {**filled, "reward": {**reward, "functions": functions}}


def _with_tasksets(filled: dict[str, Any]) -> dict[str, Any]:
    """Returns the tree in which each dataset `verifiers:NAME` has the environment of that name.

    Datasets are read apart from the environment, and their rows come from it.
    """
    environment = set_keys(filled.get("environment"))
    options = environment.get("options")
    if environment.get("name") != "verifiers" or not isinstance(options, dict):
        return filled
    environments = options.get("environments")
    if not isinstance(environments, dict):
        return filled

    def with_environment(dataset: Any) -> Any:
        if isinstance(dataset, (list, tuple)):
            return [with_environment(item) for item in dataset]
        keys = {"path": dataset} if isinstance(dataset, str) else set_keys(dataset)
        scheme, _, name = str(keys.get("path")).partition(":")
        if scheme != "verifiers" or name not in environments:
            return dataset
        source = {"python": options.get("python", "python"), "environment": environments[name]}
        return {**keys, "task_options": {"verifiers": source}}

    changed = dict(filled)
    data = dict(set_keys(filled.get("data")))
    if "train" in data:
        train = with_environment(data["train"])
        data["train"] = [train] if isinstance(train, dict) else train
    if "test" in data:
        data["test"] = with_environment(data["test"])
    changed["data"] = data
    evaluate = set_keys(filled.get("evaluate"))
    if isinstance(evaluate.get("sets"), dict):
        sets = {name: with_environment(value) for name, value in evaluate["sets"].items()}
        changed["evaluate"] = {**evaluate, "sets": sets}
    return changed


def set_keys(section: Any) -> dict[str, Any]:
    """Returns the keys that the user set in a section, which is a mapping or, in code, a model."""
    if isinstance(section, BaseModel):
        return section.model_dump(exclude_unset=True)
    return section if isinstance(section, dict) else {}
