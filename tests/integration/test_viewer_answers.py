"""The viewer's samples and questions in a headless browser: filters, messages by role, two runs side by side."""

from __future__ import annotations

import json

import pytest

from tests.helpers.browser import IN_A_BROWSER, Browser
from tests.helpers.finished_run import RESPONSES

pytestmark = IN_A_BROWSER


def test_samples_are_filtered_and_their_tokens_coloured_by_difference(
    browser: Browser, url: str
) -> None:
    browser.look(1280)
    browser.open(f"{url}#samples?i=0&c=difference&g=2")
    colours = browser.evaluate(
        "[...document.querySelectorAll('.response')[0].querySelectorAll('.token')].map((n) => "
        "n.style.backgroundColor)"
    )
    assert len(colours) == 9 and "230, 120, 0" in colours[0] and "0, 114, 200" in colours[-1], (
        "orange below, blue above the engine's"
    )
    assert "trainer likelier" in browser.evaluate("document.querySelector('.scale').textContent")
    for wanted, groups in (
        ("equal", [1]),
        ("right", [1]),
        ("cut", [3]),
        ("errors", [0]),
        ("mixed", [0, 2, 3, 4, 5]),
    ):
        browser.open(f"{url}#samples?i=0&f={wanted}")
        actual = browser.evaluate(
            "[...document.querySelectorAll('.groups button')].map((node) => "
            "Number(node.dataset.group))"
        )
        assert actual == groups, wanted
    browser.wait_for("document.querySelector('.response .facts + .facts')")
    facts = browser.evaluate("document.querySelector('.response .facts + .facts').innerText")
    assert "reward" in facts and "my_reward:brevity" in facts and "advantage" in facts


def test_questions_gained_and_lost_are_listed_with_the_answers_of_both_versions(
    browser: Browser, url: str
) -> None:
    browser.look(1280)
    browser.open(f"{url}#evaluation")
    text = browser.evaluate("document.querySelector('.questions').innerText")
    assert "5 gained, 1 lost, 3 right and 1 wrong both times" in text
    listed = (
        "[...document.querySelectorAll('.questions .groups button')].map((node) => "
        "Number(node.dataset.question))"
    )
    assert browser.evaluate(listed) == [0, 4, 5, 6, 7, 8]
    for kind, questions in (("lost", [0]), ("right", [1, 2, 3]), ("wrong", [9])):
        browser.open(f"{url}#evaluation?k={kind}")
        assert browser.evaluate(listed) == questions
    browser.open(f"{url}#evaluation?n=0")
    titles = browser.evaluate(
        "[...document.querySelectorAll('.answers h3')].map((node) => node.innerText)"
    )
    assert titles == ["version 12", "version 0", "grpo_math_lr1e-6, version 12"]
    answers = browser.evaluate(
        "[...document.querySelectorAll('.answers .badge')].map((node) => node.innerText)"
    )
    assert answers == ["✗ wrong", "✓ right", "✗ wrong"]


def test_prompts_and_answers_are_messages_by_role(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(f"{url}#samples?i=0&g=4")
    roles = (
        "[...document.querySelectorAll('.detail > .panel:first-child .bubble')].map((node) => "
        "node.dataset.role)"
    )
    assert browser.evaluate(roles) == ["system", "user"]
    assert "<|im_start|>" not in browser.evaluate("document.querySelector('.detail').innerText")
    browser.open(f"{url}#samples?i=0&g=4&l=raw")
    assert "<|im_start|>system" in browser.evaluate("document.querySelector('.detail').innerText")
    browser.open(f"{url}#samples?i=0&g=2")
    roles = (
        "[...document.querySelectorAll('[data-session=\"0\"] .bubble')].map((node) => "
        "node.dataset.role)"
    )
    assert browser.evaluate(roles) == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    turns = "document.querySelectorAll('.detail > .responses [data-response=\"0\"] .bubble').length"
    assert browser.evaluate(turns) == 2, "a card has its branch turn by turn"


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        (
            "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n",
            ["system", "user"],
        ),
        ("<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>", ["tool"]),
        ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>", ["user"]),
        ("<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n", ["user"]),
        (
            "<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|start|>user<|message|>b<|end|>",
            ["assistant", "user"],
        ),
        ("<|user|>What is 2+2?<|assistant|>", ["user"]),
        (
            "<\uff5cbegin\u2581of\u2581sentence\uff5c>be "
            "brief<\uff5cUser\uff5c>hi<\uff5cAssistant\uff5c>yes",
            ["", "user", "assistant"],
        ),
        ("<s>[INST] hi [/INST] yes</s>", ["user", "assistant"]),
        ("no marks at all <b>user</b>", [""]),
        ("", []),
    ],
)
def test_messages_of_known_chat_templates(
    browser: Browser, url: str, text: str, roles: list[str]
) -> None:
    if browser.evaluate("typeof messagesOf") != "function":
        browser.open(f"{url}#processes")
    assert (
        browser.evaluate(f"messagesOf({json.dumps(text)}).map((message) => message.role)") == roles
    )


def test_samples_are_chosen_and_ordered_by_reward_and_two_runs_answers_stand_side_by_side(
    browser: Browser, url: str
) -> None:
    browser.look(1280)
    browser.open(f"{url}#samples?i=1")
    bars = (
        "[...document.querySelectorAll('.histogram button')].map((node) => "
        "node.getAttribute('aria-label'))"
    )
    assert browser.evaluate(bars) == ["0.2: 10", "1.2: 14"]
    browser.evaluate("document.querySelectorAll('.histogram button')[0].click()")
    groups = (
        "[...document.querySelectorAll('.groups button')].map((node) => Number(node.dataset.group))"
    )
    browser.wait_for(f"JSON.stringify({groups}) === '[0,2,3,4,5]'")  # group 1 has no such reward
    browser.open(f"{url}#samples?i=1&s=high&g=4")
    browser.wait_for("document.querySelectorAll('.peer .response').length > 0")
    numbers = (
        "[...document.querySelectorAll('.detail > .responses .response')].map((n) => "
        "Number(n.dataset.response))"
    )
    assert browser.evaluate(numbers) == [1, 3, 0, 2], "right answers first"
    assert browser.evaluate("document.querySelector('.peer').dataset.peer") == "grpo_math_lr1e-6"
    assert browser.evaluate("document.querySelectorAll('.peer .response').length") == RESPONSES
