"""Finds thoughts: text that a model writes before its answer, between marks such as <think>.

A thought is no part of the answer. A chat template may end the prompt with the opening mark; the
response then begins inside a thought. A thought that is never closed contains all that follows it:
such a response has no answer, whoever opened the thought.
"""

from __future__ import annotations

import re

# Qwen, DeepSeek and most others; Claude's style; Gemma's; Seed-OSS; Magistral; Kimi; Sky-T1.
_OPENING = r"<think>|<thinking>|<thought>|<seed:think>|\[THINK\]|◁think▷|<\|begin_of_thought\|>"
_CLOSING = r"</think>|</thinking>|</thought>|</seed:think>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>"
_MARK = re.compile(rf"(?P<opening>{_OPENING})|(?:{_CLOSING})", re.IGNORECASE)
_OPENED_BY_PROMPT = re.compile(rf"(?:{_OPENING})\s*\Z", re.IGNORECASE)
_MENTION = re.compile(  # a mark in quotes, as in a sentence or a program about marks
    rf"(?<!\w)([`\"'])[^`\"'\n]{{0,80}}?(?:{_OPENING}|{_CLOSING})[^`\"'\n]{{0,80}}\1(?!\w)",
    re.IGNORECASE,
)
# gpt-oss writes its thought and its answer into channels. Without special tokens their names remain.
_CHANNEL = "<|channel|>"
_FINAL_CHANNEL = re.compile(
    r"<\|channel\|>\s*final\b[^<]{0,40}<\|message\|>|(?<=\S)assistantfinal(?=\S)"
)
_END_OF_CHANNEL = re.compile(r"(?:<\|(?:end|return|call)\|>.*)\Z", re.DOTALL)
_LONGEST_MARK = 200  # with the space behind it


def opened_thought(prompt: str) -> str:
    """Returns the opening mark that the prompt ends with, and the space behind it; empty if none."""
    match = _OPENED_BY_PROMPT.search(prompt[-_LONGEST_MARK:])
    return match[0] if match else ""


def without_thought(prompt: str, response: str) -> str:
    """Returns the part of a response behind its last thought; empty if that is never closed.

    `prompt`: as the model read it, since it may have opened a thought; may be empty. A mark in
    quotes does not count. Of channels (gpt-oss) the final one counts.
    """
    if _CHANNEL in response or response.startswith("analysis"):
        final = list(_FINAL_CHANNEL.finditer(response))
        if final:
            return _END_OF_CHANNEL.sub("", response[final[-1].end() :])
        if _CHANNEL in response:
            return ""
    if "<" not in response and "[" not in response and "◁" not in response:
        return "" if opened_thought(prompt) else response
    text = _MENTION.sub(lambda mention: " " * len(mention[0]), response)
    marks = list(_MARK.finditer(text))
    if not marks:
        return "" if opened_thought(prompt) else response
    last = marks[-1]
    return "" if last["opening"] else response[last.end() :]
