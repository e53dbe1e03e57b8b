"""Reads sentences that answer the question of a prompt in the question's own words.

To "Who wrote Hamlet?" these are "Shakespeare wrote Hamlet", "It was Shakespeare who wrote Hamlet" and
"Hamlet was written by Shakespeare".
"""

from __future__ import annotations

import re

_MAX_CHARACTERS = 2000  # of the end of a prompt
_QUESTION = re.compile(
    r"(?:^|[.!?>:;\n]\s*|,\s+)(?P<word>who|what|which(?:\s+[\w'\u2019-]+){0,4}?)\s+"
    r"(?P<rest>(?:is|are|was|were|has|have|had|can|\w+(?:ed|s|es))\b[^?.\n]{2,200}|"
    r"(?<=who )[^?.\n]{2,200})\?",
    re.IGNORECASE | re.MULTILINE,
)
_VERB_AND_OBJECT = re.compile(r"(?P<verb>\w+)\s+(?P<object>\S.*)", re.DOTALL)
_PARTICIPLES = {
    "wrote": "written",
    "drew": "drawn",
    "sang": "sung",
    "took": "taken",
    "gave": "given",
    "chose": "chosen",
    "broke": "broken",
    "began": "begun",
    "beat": "beaten",
    "flew": "flown",
    "knew": "known",
    "stole": "stolen",
}


def answer_in_words_of(prompt: str, sentence: str) -> str | None:
    """Returns what a sentence puts in the place of the prompt's question word; None if it does not.

    `sentence`: without its mark at the end. Only the last question of the prompt counts.
    """
    questions = list(_QUESTION.finditer(prompt[-_MAX_CHARACTERS:]))
    if not questions:
        return None
    rest = _spaced(questions[-1]["rest"])
    statement = _spaced(sentence)
    active = re.fullmatch(
        rf"(?:it (?:is|was)\s+)?(?P<value>.{{1,100}}?)(?:,? (?:who|that|which))? {re.escape(rest)}",
        statement,
        re.IGNORECASE,
    )
    if active is not None:
        return active["value"]
    parts = _VERB_AND_OBJECT.fullmatch(rest)
    if parts is None:
        return None
    participle = _PARTICIPLES.get(parts["verb"].lower(), parts["verb"])
    passive = re.fullmatch(
        rf"{re.escape(parts['object'])} (?:is|are|was|were) {re.escape(participle)} by "
        r"(?P<value>.{1,100})",
        statement,
        re.IGNORECASE,
    )
    return passive["value"] if passive is not None else None


def _spaced(text: str) -> str:
    return " ".join(text.split())
