"""`pa-npu serve` before anything starts: keys that a service does not have, one service in a directory, its key."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, UserError
from pa_npu.launcher.serve import (
    Watch,
    check,
    service_directory,
    with_likely_tokens,
    write_configuration,
)
from pa_npu.service.commands import STARTS_AGAIN

REFUSED: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "megatron": ({"trainer": {"backend": "megatron"}}, "trainer.backend: megatron"),
    "two senders": ({"trainer": {"devices": 2}}, "publish.senders"),
    "copies of the weights": (
        {"trainer": {"devices": 4, "shards": 2}, "publish": {"senders": "leader"}},
        "trainer.devices: 4 ranks hold 2 shards",
    ),
    "two engines": ({"rollout": {"engines": 2}}, "rollout.engines"),
    "offload": ({"optimizer": {"offload": True}}, "optimizer.offload"),
    "a reference": ({"algorithm": {"kl_coef": 0.1}}, "no reference"),
    "a temperature": ({"rollout": {"temperature": 0.7}}, "rollout.temperature: 0.7"),
    "entropy": ({"algorithm": {"entropy_coef": 0.1}}, "algorithm.entropy_coef"),
}


class Ended:
    """A process that has ended."""

    name = "service"

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code

    def last_lines(self, count: int) -> list[str]:
        return []

    def describe_end(self) -> str:
        return f"exit code {self.exit_code}"


def config_of(**sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"train": "unread"},
        "trainer": {"backend": "fsdp"},
        "rollout": {"backend": "transformers"},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


def test_a_service_of_defaults_is_accepted() -> None:
    check(config_of())
    check(config_of(trainer={"devices": 2}, publish={"senders": "leader"}))


def test_an_engine_of_vllm_gives_as_many_likely_tokens_as_clients_may_ask_for() -> None:
    config = config_of(rollout={"backend": "vllm", "extra_args": ["--max-logprobs", "7"]})
    assert with_likely_tokens(config).rollout.extra_args[-2:] == ("--max-logprobs", "1024")
    assert with_likely_tokens(config_of()).rollout.extra_args == ()


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_a_service_does_not_have_are_one_line(name: str) -> None:
    sections, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words) as refusal:
        check(config_of(**sections))
    assert "\n" not in str(refusal.value)


def test_a_directory_has_one_service_and_a_key_that_stays(tmp_path: Path) -> None:
    with service_directory(tmp_path) as key:
        assert key.startswith("tml-") and len(key) > 40
        assert stat.S_IMODE((tmp_path / "service" / "key").stat().st_mode) == 0o600
        with pytest.raises(UserError, match="another service"), service_directory(tmp_path):
            pass
    with service_directory(tmp_path) as again:
        assert again == key


def test_the_configuration_is_its_owners_alone(tmp_path: Path) -> None:
    write_configuration(tmp_path / "config.yaml", config_of())
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o600


def test_a_start_behind_a_request_that_has_its_error_is_not_counted() -> None:
    lines: list[str] = []

    class Lines:
        print_line = print_error = lines.append

    parts: Any = {"processes": None, "tree": None, "console": Lines, "signals": None}
    watch = Watch(config_of(run={"restarts": 1}), **parts, port=0)
    for _ in range(3):
        assert watch._may_restart("service and trainers", [Ended(STARTS_AGAIN)])
    assert watch._may_restart("service and trainers", [Ended(1)])
    assert not watch._may_restart("service and trainers", [Ended(1)]), "control: others are"
    assert "run.restarts" in lines[-1]
