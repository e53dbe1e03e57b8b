"""A prompt is written by the tokenizer's template or by one of one's own, with the variables that it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pa_npu.data.template import template_variables
from tests.helpers.datasets import QUESTION, load, refusal, write
from tools.make_tiny_model import make_tokenizer


def test_template_policy_follows_the_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", QUESTION)
    without = make_tokenizer()
    without.chat_template = None
    assert load(path, without)[0].text == QUESTION["question"]
    assert "data.chat_template: always" in refusal(path, without, chat_template="always")
    refusing = make_tokenizer()
    refusing.chat_template = "{{ raise_exception('no system role here') }}"
    message = refusal(path, refusing, system_prompt="S")
    assert (
        f"{path}:1" in message
        and "no system role here" in message
        and "data.chat_template=never" in message
    )


# Like Qwen3's: thinking is left out by an empty block that the model finds already written.
THINKING = (
    "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and enable_thinking is "
    "false %}(no thoughts){% endif %}{% endif %}"
)


def test_thinking_is_switched_by_the_templates_own_variable(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", QUESTION)
    thinking = make_tokenizer()
    thinking.chat_template = THINKING
    text = "<|user|>What is 12+34?<|assistant|>"
    assert load(path, thinking)[0].text == text
    assert load(path, thinking, template_options={"enable_thinking": True})[0].text == text
    assert (
        load(path, thinking, template_options={"enable_thinking": False})[0].text
        == f"{text}(no thoughts)"
    )
    message = refusal(path, thinking, template_options={"enable_thought": False})
    assert "does not read enable_thought (it reads enable_thinking)" in message
    for how in ("tokenize", "messages"):
        assert f"does not read {how} " in refusal(path, thinking, template_options={how: True})
    # whose variables cannot be told
    thinking.chat_template = THINKING + "{% generation %}{% endgeneration %}"
    assert "does not read messages " in refusal(path, thinking, template_options={"messages": []})
    thinking.chat_template = None
    assert "no chat template to read them" in refusal(
        path, thinking, template_options={"enable_thinking": False}
    )


def test_a_template_of_ones_own_is_a_file(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", QUESTION)
    own = tmp_path / "own.jinja"
    own.write_text("Q: {{ messages[-1].content }}{% if brief %} (brief){% endif %}")
    plain = make_tokenizer()
    plain.chat_template = None
    for model in (tokenizer, plain):
        assert load(path, model, chat_template=str(own))[0].text == "Q: What is 12+34?"
        options = {"chat_template": str(own), "template_options": {"brief": True}}
        assert load(path, model, **options)[0].text == "Q: What is 12+34? (brief)"
    for content, words in (
        (None, "No such file"),
        (b"", "is empty"),
        (b"\xff", "cannot be read"),
        (b"x" * (1 << 21), "larger"),
    ):
        bad = tmp_path / "bad.jinja"
        if content is not None:
            bad.write_bytes(content)
        assert words in refusal(path, tokenizer, chat_template=str(bad))


def test_variables_of_a_template_are_found_where_they_can_be_told() -> None:
    assert template_variables(THINKING) == {"enable_thinking"}
    assert template_variables(
        "{% for m in messages %}{{ bos_token }}{{ tools }}{% endfor %}{% set x = 1 %}{{ x }}"
    ) == {"tools"}
    assert template_variables("{% generation %}{% endgeneration %}") is None
    assert template_variables({"default": THINKING}) is None
    assert template_variables("{{ " + "(" * 50_000) is None
