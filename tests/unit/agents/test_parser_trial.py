"""agent.tool_parser is made before a run, wherever something of the run will need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pa_npu.agents.parser_trial import check_tool_parser
from pa_npu.errors import ConfigError
from tests.helpers.megatron import model_config
from tools.make_tiny_model import make_tokenizer


def test_a_parser_that_there_is_not_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Also where agents come later, so that nothing of theirs is tried."""
    make_tokenizer().save_pretrained(str(tmp_path))
    config = model_config(
        tmp_path, environment={"name": "agents"}, agent={"tool_parser": "template"}
    )
    with pytest.raises(
        ConfigError, match=r"^agent\.tool_parser: template, .* no response template"
    ):
        check_tool_parser(config)
    quiet = config.model_copy(
        update={"agent": config.agent.model_copy(update={"tool_parser": "hermes"})}
    )
    check_tool_parser(quiet)  # a control


@pytest.mark.nightly
def test_a_parser_that_vllm_has_not_is_refused_too(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(str(tmp_path))
    config = model_config(
        tmp_path, environment={"name": "agents"}, agent={"tool_parser": "no_such_parser"}
    )
    with pytest.raises(ConfigError, match=r"^agent\.tool_parser: .*no_such_parser"):
        check_tool_parser(config)
