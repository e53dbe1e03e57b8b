r"""The letter that a response to a multiple choice ends with.

The last \boxed{C}; else the last #### C, "answer is (C)" or "Answer: C"; else a last line that is nothing but the letter. Letters
in running text are not answers: "A good start" is none.
"""

from __future__ import annotations

import re

from pa_npu.rewards.answers import final_text, last_boxed

_SEARCHED_CHARACTERS = 10_000
_MARKED = re.compile(
    r"(?:####|\b(?:answer|choice|option)\b(?:\s+is)?\s*:?)[\s*_:]*\(?([A-Za-z])(?![A-Za-z0-9'])(?!\s+[a-z])",
    re.IGNORECASE,
)
_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\s*\(?([A-Za-z])(?![A-Za-z0-9])")
_ALONE = re.compile(r"^[\s*_$(\[]*([A-Z])[\s*_$)\].:]*$")


def chosen_letter(response: str, letters: str) -> str | None:
    """One of `letters`, or None where the response does not commit itself."""
    text = final_text(response)[-_SEARCHED_CHARACTERS:]
    boxed = last_boxed(text)
    if boxed is not None:
        found = _BOXED.match(_DECORATION.sub(r"\1", boxed))
        letter = found[1].upper() if found else None
        return letter if letter is not None and letter in letters else None
    marked = [found[1].upper() for found in _MARKED.finditer(text) if found[1].upper() in letters]
    if marked:
        return marked[-1]
    lines = [line for line in text.splitlines() if line.strip()]
    alone = _ALONE.match(lines[-1]) if lines else None
    return alone[1] if alone and alone[1] in letters else None
