"""Rules between the configuration and the model it names; pure, so that every process can check them."""

from __future__ import annotations

from pa_npu.config.model_spec import ModelSpec
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError


def check_model(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError where the model cannot be divided as configured, or is too short for the sequences."""
    for broken in _broken_rules(config, spec):
        raise ConfigError(broken)


def _broken_rules(config: Config, spec: ModelSpec) -> list[str]:
    broken = []
    for what, size in (
        ("attention heads", spec.num_heads),
        ("key/value heads", spec.num_kv_heads),
        ("feed-forward size", spec.ffn_size),
    ):
        broken += _indivisible("trainer.tensor_parallel", config.trainer.tensor_parallel, what, size, spec)
    broken += _indivisible(
        "trainer.pipeline_parallel", config.trainer.pipeline_parallel, "layers", spec.num_layers, spec
    )
    engine = config.rollout.tensor_parallel
    broken += _indivisible("rollout.tensor_parallel", engine, "attention heads", spec.num_heads, spec)
    if spec.num_kv_heads % engine and engine % spec.num_kv_heads:
        broken.append(
            f"rollout.tensor_parallel: {engine} neither divides the {spec.num_kv_heads} key/value heads of {spec.path} "
            f"nor is a multiple of them; set it to one that does"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > spec.max_positions:
        broken.append(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {config.data.max_prompt_tokens} + "
            f"{config.rollout.max_response_tokens} exceeds the {spec.max_positions} positions of {spec.path}; lower one"
        )
    return broken


def _indivisible(key: str, parts: int, what: str, size: int, spec: ModelSpec) -> list[str]:
    if size % parts == 0:
        return []
    divisors = [n for n in range(1, min(size, 64) + 1) if size % n == 0]
    return [f"{key}: {parts} does not divide the {size} {what} of {spec.path}; set it to one of {divisors}"]
