"""Rules between the configuration and the model it names; pure, so that every process can check them.

check_model(config, spec)      all of them, before a run
check_engine(config, spec)     those that starting an engine needs
check_division(config, spec)   those that building the trainer's model needs
padded_vocab(spec, tensor_parallel)
"""

from __future__ import annotations

from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec


def padded_vocab(spec: ModelSpec, tensor_parallel: int) -> int:
    """Rows of embedding and LM head over all TP ranks: the vocabulary rounded up to a multiple of
    TP.
    """
    return -(-spec.vocab_size // tensor_parallel) * tensor_parallel


def check_model(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError where the model cannot be divided as configured, or is too short for the
    sequences.
    """
    for broken in (*_division_rules(config, spec), *_engine_rules(config, spec)):
        raise ConfigError(broken)


def check_engine(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError where an engine cannot divide the model, or the model is too short for the
    sequences.
    """
    for broken in _engine_rules(config, spec):
        raise ConfigError(broken)


def check_division(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError where TP or PP of the trainers does not divide the model's sizes."""
    for broken in _division_rules(config, spec):
        raise ConfigError(broken)


def _division_rules(config: Config, spec: ModelSpec) -> list[str]:
    stages = config.trainer.pipeline_parallel
    return [
        *_tensor_rules(config.trainer.tensor_parallel, spec),
        *_indivisible("trainer.pipeline_parallel", stages, "layers", spec.num_layers, spec),
        *_expert_rules(config, spec),
    ]


def _expert_rules(config: Config, spec: ModelSpec) -> list[str]:
    trainer = config.trainer
    if spec.experts is None:
        values = {
            "trainer.expert_parallel": trainer.expert_parallel > 1 and trainer.expert_parallel,
            "algorithm.router_aux_coef": config.algorithm.router_aux_coef,
            "algorithm.router_replay": config.algorithm.router_replay != "none"
            and config.algorithm.router_replay,
        }
        named = [f"{key}: {value}" for key, value in values.items() if value]
        return [f"{key}, but {spec.path} is no mixture of experts; remove the key" for key in named]
    return _indivisible(
        "trainer.expert_parallel", trainer.expert_parallel, "experts", spec.experts.count, spec
    )


def _tensor_rules(tensor: int, spec: ModelSpec) -> list[str]:
    broken = []
    for what, size in (
        ("attention heads", spec.num_heads),
        ("key/value heads", spec.num_kv_heads),
        ("feed-forward size", spec.ffn_size),
    ):
        broken += _indivisible("trainer.tensor_parallel", tensor, what, size, spec)
    if (tensor - 1) * (padded_vocab(spec, tensor) // tensor) >= spec.vocab_size:
        broken.append(
            f"trainer.tensor_parallel: {tensor} leaves a rank without any of the {spec.vocab_size} "
            f"tokens of {spec.path}; set it to a smaller number"
        )
    return broken


def _engine_rules(config: Config, spec: ModelSpec) -> list[str]:
    broken = []
    engine = config.rollout.tensor_parallel
    broken += _indivisible(
        "rollout.tensor_parallel", engine, "attention heads", spec.num_heads, spec
    )
    if spec.num_kv_heads % engine and engine % spec.num_kv_heads:
        broken.append(
            f"rollout.tensor_parallel: {engine} neither divides the {spec.num_kv_heads} key/value "
            f"heads of {spec.path} nor is a multiple of them; set it to one that does"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > spec.max_positions:
        broken.append(
            "data.max_prompt_tokens + rollout.max_response_tokens = "
            f"{config.data.max_prompt_tokens} + {config.rollout.max_response_tokens} exceeds the "
            f"{spec.max_positions} positions of {spec.path}; lower one"
        )
    return broken


def _indivisible(key: str, parts: int, what: str, size: int, spec: ModelSpec) -> list[str]:
    if size % parts == 0:
        return []
    divisors = [n for n in range(1, min(size, 64) + 1) if size % n == 0]
    return [
        f"{key}: {parts} does not divide the {size} {what} of {spec.path}; set it to one of "
        f"{divisors}"
    ]
