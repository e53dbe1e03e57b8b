"""Finds where a text states its answer, in several languages: phrases, headings, ends of sentences.

Phrases are such as "the answer is".
"""

from __future__ import annotations

import re

_ENGLISH = (
    r"answer[\s*_]*(?:is\s*:?|:|=|[-\u2013\u2014](?=\s))[\s*_]*"
    r"(?:(?:about|approximately|exactly|simply|just|equal to)\s+)?"
)
# A word for "answer", and what joins it to the answer. "Is not" does not join them: a denial states
# nothing.
_OTHER_LANGUAGES = (
    r"(?:最终|最后|正确)?答案(?:应该|应当|就|便)?(?:是|为|選|选|等于|[:：=])\s*[:：]?",
    r"(?:^|(?<=[\s。，；]))答\s*[:：]",
    r"(?:故|因此|所以)?(?:应|应该)?(?:选择?|選)\s*[:：]?\s*(?=[(（]?[A-J](?![A-Za-z]))",
    r"(?:答え|答|解答|正解)\s*(?:は|[:：])\s*[:：]?",
    r"(?:정답|답)\s*(?:은|는|:)\s*:?",
    r"(?:Antwort|Lösung)\s*(?:ist|lautet|beträgt|:)\s*:?",
    r"réponse\s*(?:finale\s*|correcte\s*)?(?:est|:)\s*:?",
    r"respuesta\s*(?:final\s*|correcta\s*)?(?:es|:)\s*:?",
    r"resposta\s*(?:final\s*|correta\s*)?(?:é|:)\s*:?",
    r"risposta\s*(?:finale\s*|corretta\s*)?(?:è|:)\s*:?",
    r"(?<!\w)(?:ответ|відповідь)\s*(?:равен|:|=|[-\u2013\u2014](?=\s))\s*:?",
    r"odpowied(?:ź|zią)\s*(?:to|jest|brzmi|:)\s*:?",
    r"(?:antwoord|svaret|svar)\s*(?:is|är|er|:)\s*:?",
    r"(?:cevap|yanıt)\s*:",
    r"(?:đáp án|đáp số|câu trả lời)\s*(?:là|:)\s*:?",
    r"jawaban(?:nya)?\s*(?:adalah|:)\s*:?",
    r"(?:الإجابة|الجواب|الجواب النهائي|الإجابة النهائية)\s*(?:هي|هو|:)\s*:?",
    r"उत्तर\s*:",
)
_PHRASE = re.compile(
    "|".join([_ENGLISH, *(rf"{phrase}[\s*_]*" for phrase in _OTHER_LANGUAGES)]),
    re.IGNORECASE | re.MULTILINE,
)
_COMMENT = re.compile(
    r"(?:helpful|useful|clear|correct|consistent|reasonable|verified|confirmed)\b", re.IGNORECASE
)
_MARKUP_BEFORE_COLON = re.compile(r"(?<=\w)(?:\*\*|__)(?=\s*[:：])")  # **Answer**: 5
SENTENCE_END = re.compile(r"[.!?](?:\s|$)|[。！？]|\n|;\s")
_DAY_AND_MONTH = re.compile(r"\d\. [^\W\d]+\.? \d{3,4}")  # 29. Februar 2024
_STEP = (
    "step|part|case|section|method|approach|solution|phase|stage|question|problem|exercise|example|claim|lemma|theorem|note|figure|"
    "table|option|scenario|round|check|chapter|task|point|schritt|teil|fall|aufgabe|étape|partie|cas|paso|parte|caso|etapa|passo|"
    "passaggio|шаг|часть|этап|случай|krok|stap|steg|adım|bước|langkah"
)
_NUMBER_OF_STEP = (
    r"(?:#\s*)?(?:\d+(?:\.\d+)*|[IVX]+|[A-H]|one|two|three|four|five|six|seven|eight|nine|ten)"
)
_NUMBERED = re.compile(
    rf"(?:(?:{_STEP})\s+{_NUMBER_OF_STEP}(?!\w)"
    r"|第\s*[\d一二三四五六七八九十]+\s*(?:步|部分|章|节|節|個?步骤|段)|(?:步骤|ステップ|단계)\s*[\d一二三四五六七八九十]+"
    r"|\d+\s*단계)\s*[:：.)\-\u2013\u2014,]?\s*",
    re.IGNORECASE,
)
_TITLE_WORD = r"[^\W\d]+(?:['\u2019][^\W\d]+)?"
_LISTED = re.compile(
    r"\(?(?:\d+(?:\.\d+)*|[IVX]+|[a-h])[.):、]\s*"
    rf"{_TITLE_WORD}(?:[\s,:&/()\-\u2013]+{_TITLE_WORD}){{0,7}}[\s,:&/()\-\u2013]*$"
)
_TITLE = re.compile(
    r"(?:the\s+)?(?:(?:final|short|correct|full|complete)\s+)?(?:answer|conclusion|summary|result|solution|verification|check|"
    r"explanation|reasoning|analysis|overview|setup|steps|calculation|computation|final step|wrap-?up|step-by-step solution|"
    r"结论|答案|最终答案|总结|解答|解析|验证|結論|まとめ|결론|답|fazit|ergebnis|antwort|lösung|conclusion|réponse|résultat|conclusión|"
    r"respuesta|resultado|conclusão|resposta|conclusione|risposta|вывод|ответ|решение|заключение)s?\s*[:：]?",
    re.IGNORECASE,
)


def last_phrase(text: str) -> tuple[int, int] | None:
    """Returns begin and end of the last phrase such as "the answer is"; None if there is none.

    "I hope that the answer is helpful" states no answer.
    """
    plain = _MARKUP_BEFORE_COLON.sub("  ", text)  # of the same length
    last = None
    for match in _PHRASE.finditer(plain):
        if not _COMMENT.match(plain, match.end()):
            last = match
    return (last.start(), last.end()) if last else None


def is_heading(line: str) -> bool:
    """Returns whether a line is a title: "Step 2: Conclusion", "2. Adding up", "Conclusion".

    `line`: without Markdown. "5. So it is 5" is none, since it has a digit behind its number, and
    "46 apples" is none.
    """
    return bool(_NUMBERED.match(line) or _LISTED.match(line) or _TITLE.fullmatch(line))


def behind_number(line: str) -> str:
    """Returns the rest of a heading such as "Step 2: 46" behind its number; else empty."""
    match = _NUMBERED.match(line)
    return line[match.end() :] if match else ""


def first_sentences(text: str, like: str) -> str:
    """Returns the beginning of a text up to the end of a sentence.

    `like`: an answer, such as "St. Louis". As many ends of sentences as it contains are passed over
    in the text.
    """
    inside = len(SENTENCE_END.findall(like.strip().rstrip(".!?。！？")))
    ends = [
        end
        for end in SENTENCE_END.finditer(text)
        if not _DAY_AND_MONTH.match(text, max(0, end.start() - 1))
    ]
    for number, end in enumerate(ends):
        if number == inside:
            return text[: end.start()].strip()
    return text.strip()
