"""Rules between the configuration and the model that it names; any process can check them.

check_model(config, spec)            all of them, before a run
check_engine(config, spec)           those that starting an engine needs
check_division(config, spec)         those that building the trainer's model needs
settled_rule(config, spec)           turns off what the model forbids and nobody asked for
padded_vocab(spec, tensor_parallel)  rows of the embedding under tensor parallelism
"""

from __future__ import annotations

from typing import Any

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec


def padded_vocab(spec: ModelSpec, tensor_parallel: int) -> int:
    """Returns the rows of embedding and LM head over all TP ranks: the vocabulary, rounded up to a
    multiple of TP.
    """
    return -(-spec.vocab_size // tensor_parallel) * tensor_parallel


def check_model(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError where the model cannot be divided as configured, or has fewer positions
    than the longest sequence.
    """
    check_division(config, spec)
    check_engine(config, spec)


def check_engine(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError where an engine cannot divide the model, or the model has fewer positions
    than the longest sequence.
    """
    for message in _engine_rules(config, spec):
        raise ConfigError(message)


def check_division(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError where the trainers' TP, PP or EP does not divide the model's sizes."""
    for message in _division_rules(config, spec):
        raise ConfigError(message)


def settled_rule(config: Config, spec: ModelSpec) -> Config:
    """Returns the configuration with schedule.skip_zero_advantage set to false, where it was not
    given and sharded trainers have a mixture of experts (_expert_rules).
    """
    is_sharded_mixture = spec.experts is not None and config.trainer.backend == "fsdp"
    if not is_sharded_mixture or config.schedule.skip_zero_advantage is not None:
        return config
    if not build_algorithm(config).trains_by_rule:
        return config
    schedule = config.schedule.model_copy(update={"skip_zero_advantage": False})
    return config.model_copy(update={"schedule": schedule})


def _division_rules(config: Config, spec: ModelSpec) -> list[str]:
    stages = config.trainer.pipeline_parallel
    return [
        *_tensor_rules(config.trainer.tensor_parallel, spec),
        *_indivisible("trainer.pipeline_parallel", stages, "layers", spec.num_layers, spec),
        *_expert_rules(config, spec),
        *_vision_rules(config, spec),
    ]


def _vision_rules(config: Config, spec: ModelSpec) -> list[str]:
    if spec.num_tower_parameters and config.trainer.backend != "fsdp":
        return [
            f"trainer.backend: {config.trainer.backend}, but {spec.path} reads images, which only "
            "fsdp trains; set trainer.backend=fsdp"
        ]
    ranks = config.trainer.context_parallel
    if ranks == 1 or not spec.num_tower_parameters:
        return []
    return [
        f"trainer.context_parallel: {ranks}, but {spec.path} reads images, whose rows are not "
        "divided over ranks; set it to 1"
    ]


def _expert_rules(config: Config, spec: ModelSpec) -> list[str]:
    ranks = config.trainer.expert_parallel
    skips = config.schedule.skip_zero_advantage and config.trainer.backend == "fsdp"
    if spec.experts is not None and skips:
        return [
            f"schedule.skip_zero_advantage: true, but {spec.path} is a mixture of experts: with "
            "trainer.backend=fsdp an expert to which no computed token goes gets no step, not that "
            "of a gradient of 0; set it to false, or trainer.backend to megatron"
        ]
    if spec.experts is not None:
        return _indivisible("trainer.expert_parallel", ranks, "experts", spec.experts.count, spec)
    algorithm = config.algorithm
    experts_keys: dict[str, Any] = {}
    if ranks > 1:
        experts_keys["trainer.expert_parallel"] = ranks
    if algorithm.router_aux_coef:
        experts_keys["algorithm.router_aux_coef"] = algorithm.router_aux_coef
    if algorithm.router_replay != "none":
        experts_keys["algorithm.router_replay"] = algorithm.router_replay
    return [
        f"{key}: {value}, but {spec.path} is no mixture of experts; remove the key"
        for key, value in experts_keys.items()
    ]


def _tensor_rules(tensor: int, spec: ModelSpec) -> list[str]:
    key = "trainer.tensor_parallel"
    messages = [
        *_indivisible(key, tensor, "attention heads", spec.num_heads, spec),
        *_indivisible(key, tensor, "key/value heads", spec.num_kv_heads, spec),
        *_indivisible(key, tensor, "feed-forward size", spec.ffn_size, spec),
    ]
    rows_per_rank = padded_vocab(spec, tensor) // tensor
    if (tensor - 1) * rows_per_rank >= spec.vocab_size:
        messages.append(
            f"{key}: {tensor} leaves a rank without any of the {spec.vocab_size} tokens of "
            f"{spec.path}; set it to a smaller number"
        )
    return messages


def _engine_rules(config: Config, spec: ModelSpec) -> list[str]:
    key = "rollout.tensor_parallel"
    tensor = config.rollout.tensor_parallel
    messages = _indivisible(key, tensor, "attention heads", spec.num_heads, spec)
    if spec.num_kv_heads % tensor and tensor % spec.num_kv_heads:
        messages.append(
            f"{key}: {tensor} neither divides the {spec.num_kv_heads} key/value "
            f"heads of {spec.path} nor is a multiple of them; set it to one that does"
        )
    prompt = config.data.max_prompt_tokens
    response = config.rollout.max_response_tokens
    if prompt + response > spec.max_positions:
        messages.append(
            "data.max_prompt_tokens + rollout.max_response_tokens = "
            f"{prompt} + {response} exceeds the {spec.max_positions} positions of {spec.path}; "
            "lower one"
        )
    elif config.engine_tokens > spec.max_positions:
        messages.append(
            "teacher.NAME.max_prompt_tokens + rollout.max_response_tokens + 1 = "
            f"{config.engine_tokens} exceeds the {spec.max_positions} positions of {spec.path}; "
            "lower one"
        )
    return messages


def _indivisible(key: str, parts: int, subject: str, size: int, spec: ModelSpec) -> list[str]:
    """Returns a message where `parts` does not divide the `size` things named `subject`."""
    if size % parts == 0:
        return []
    divisors = [n for n in range(1, min(size, 64) + 1) if size % n == 0]
    return [
        f"{key}: {parts} does not divide the {size} {subject} of {spec.path}; set it to one of "
        f"{divisors}"
    ]
