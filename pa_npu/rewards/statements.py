"""Reads what the last sentence of a response states, for references in words.

"So the capital is **Ottawa**." states Ottawa. Read is only a whole sentence of one of these forms:

- a conclusion and nothing but the answer: "So Ottawa.";
- a definite subject, a form of "to be", and the answer: "the capital of Canada is Ottawa";
- the answer, and that it is the answer: "Ottawa is correct";
- the answer, and what it is, if nothing else can be meant: "Ottawa is the capital of Canada";
- the answer in the words of the prompt's question (questions.py).

Where the prompt asks for the subject, remarks may follow: "The capital of Canada is Ottawa. It has
a million inhabitants."

A subject that denies, doubts, quotes or chooses among several ("the wrong choice", "the teacher
thinks", "the other city", "if") states nothing, nor does a question. So does a last sentence whose
subject differs from that of an earlier statement, unless the prompt asks for it: behind "The
capital is Toronto." the sentence "The largest city is Ottawa." is a remark.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pa_npu.rewards.phrases import SENTENCE_END
from pa_npu.rewards.questions import answer_in_words_of

_MAX_SENTENCE_CHARACTERS = 300
_MAX_STATEMENTS = 200  # of the end of a response, that are compared with the last
_MARKUP = re.compile(
    r"\*+|_{2,}|(?<!\w)_(?=\w)|(?<=\w)_(?!\w)|`+|\\(?:text|textbf|mathrm|emph)\b|[{}$]"
)
_LIST_MARK = re.compile(r"^(?:>\s*)?(?:[-+•]\s+|\d{1,2}[.)]\s+)?")
_CONCLUSION = (
    r"(?:so|thus|hence|therefore|consequently|accordingly|finally|clearly|as a result|in conclusion"
    r"|in summary|to conclude|overall|conclusion|we conclude|it follows|this means|i conclude"
    r"|also|somit|daher|deshalb|folglich|donc|ainsi|par conséquent|por lo tanto|por tanto|así"
    r"|portanto|logo|quindi|dunque|pertanto|итак|следовательно|значит|таким образом|поэтому"
    r"|所以|因此|因而|故|综上|總之|总之|したがって|よって|따라서|그러므로)"
)
_LEAD_IN = re.compile(
    r"(?:(?:and|but|okay|ok|well|yes|alright|right|in fact|in reality|indeed),?\s+)?"
    rf"(?:{_CONCLUSION}(?:\s*[,，:]\s*|\s+(?:that\s+)?|(?<=[\u4e00-\u9fff])))?"
    r"(?:i (?:think|believe|am (?:confident|sure|certain))\s+(?:that\s+)?)?",
    re.IGNORECASE,
)
_NAME = r"[^\W\d_][\w'\u2019.-]*"
_DETERMINER = (
    r"(?:the|its|this|that|their|his|her|our|my|der|die|das|ihre?|seine?|le|la|les|son|sa|el|los"
    r"|las|su|o|a|os|as|seu|sua|il|lo|i|gli|suo)"
)
_PREPOSITION = (
    r"(?:of|in|for|to|on|at|with|by|from|von|vom|des|im|für|aus|de|del|du|d['\u2019]|della|dello|di"
    r"|da|do)"
)
_NOUNS = rf"{_NAME}(?:\s+{_NAME}){{0,3}}"
_ATTRIBUTES = (
    rf"(?:\s+{_PREPOSITION}\s+(?:{_DETERMINER}\s+|l['\u2019])?{_NOUNS}){{0,2}}"  # of Canada
)
_SUBJECT = (
    rf"(?:(?:{_DETERMINER}\s+|l['\u2019]){_NOUNS}{_ATTRIBUTES}"
    rf"|{_NAME}(?:\s+{_NAME}){{0,2}}['\u2019]s?\s+{_NOUNS}"  # Canada's capital
    r"|it|this|that|he|she|they|es|er|sie)"
)
_COPULA = (
    r"(?:is|are|was|were|ist|sind|war|waren|est|sont|était|étaient|es|son|era|eran|fue|é|são|foi|è"
    r"|sono)"
)
_STATEMENT = re.compile(
    rf"(?P<subject>{_SUBJECT})"
    rf"\s+(?:{_COPULA}|(?<=answer )(?:should|would) be|must be|has to be)"
    r"(?:\s*:|\s+(?:therefore|thus|then|called|named|known as|also|donc))?\s+(?P<value>\S.*)",
    re.IGNORECASE | re.DOTALL,
)
_BARE_STATEMENT = re.compile(  # "Table salt is NaCl", if the prompt asks for table salt
    rf"(?P<subject>{_NOUNS}{_ATTRIBUTES})\s+(?:is|are|was|were)\s+(?P<value>\S.*)",
    re.IGNORECASE | re.DOTALL,
)
_RUSSIAN_STATEMENT = re.compile(
    r"(?P<subject>[\u0400-\u04ff][\u0400-\u04ff\s]{1,60}?)"
    r"(?:\s+[-\u2013\u2014]\s+(?:это\s+)?|\s+(?:это|является|называется)\s+)(?P<value>\S.*)",
    re.DOTALL,
)
_JAPANESE_STATEMENT = re.compile(
    r"(?P<subject>[\u3040-\u30ff\u4e00-\u9fffー]{1,30}?)は(?P<value>[^はも、]{1,60}?)(?:です|である|だ)",
    re.DOTALL,
)
_KOREAN_STATEMENT = re.compile(
    r"(?P<subject>[\uac00-\ud7af][\uac00-\ud7af\s]{0,40}?)[은는]\s+"
    r"(?P<value>(?:(?![은는]\s).){1,60}?)(?:입니다|이다|예요|이에요)",
    re.DOTALL,
)
_CHINESE_STATEMENT = re.compile(
    r"(?P<subject>[\u4e00-\u9fff]{1,20}?)[是为為](?P<value>[^是为為].*)", re.DOTALL
)
_REVERSED_STATEMENT = re.compile(
    rf"(?P<value>\S.*?)\s+{_COPULA}\s+(?P<subject>(?:the|der|die|das|le|la|el|il)"
    rf"\s+{_NOUNS}{_ATTRIBUTES})",
    re.IGNORECASE | re.DOTALL,
)
_IS_THE_ANSWER = re.compile(
    r"(?P<value>\S.*?)\s+is\s+"
    r"(?:correct|right|(?:the|my|our) (?:(?:final|correct|right|best) )*(?:answer|choice))",
    re.IGNORECASE | re.DOTALL,
)
# Words in a subject, for which its sentence states nothing about the answer.
_DENYING = (
    r"not n't no never nor neither nobody none cannot except instead than but nicht "
    r"kein\w* niemals nie pas ne non não nunca mai jamais"
)
_WRONG = (
    r"wrong incorrect\w* false untrue invalid bad worst mistaken mistakes? errors? "
    r"fallac\w+ misconception myth lie trap distractor decoy falsch\w* faux fausse falsa? "
    r"errad[oa] errat[oa] sbagliat[oa]"
)
_OTHER = (
    r"other others another alternative else opposite contrary second\w* third fourth fifth "
    r"next previous former old earlier nearest closest neighbou?r\w* rival runner example "
    r"question problem andere\w* zweite\w* ehemalige\w* frühere\w* autre\w* ancien\w* "
    r"deuxième otr[oa]s? segund[oa] antigu[oa] outr[oa]s? altr[oa]"
)
_OPEN = (
    r"if unless whether or and guess\w* hypothes\w+ assum\w+ possib\w+ potential likely "
    r"likeliest probable supposed alleged so-called candidates? options?"
)
_QUOTING = (
    r"rumou?rs? claims? claimed legend suggest\w* propos\w+ says? said thinks? thought "
    r"believes? believed states stated writes? wrote insists? argues? hopes? "
    r"den(?:y|ies|ied) doubts? doubted pretends? wish\w* tells? told reports? knows? knew "
    r"calls? called maintains? means? implies shows? asks? asked"
)
_CLAUSE = (
    r"is are was were be been am isn wasn which who whom whose what that it he she they we "
    r"you there"
)
_OTHER_SUBJECT = re.compile(
    rf"\b(?:{'|'.join(f'{_DENYING} {_WRONG} {_OTHER} {_OPEN} {_QUOTING} {_CLAUSE}'.split())})\b"
    r"|[不非未没另错錯误誤或若如假说說据據]|其他|前任|第二|认为|以为|可能|也许|或许"
    r"|\b(?:не|неверн|неправильн|ошибочн|друг|иной|ина|если|возможн|вероятн|бывш|втор|говор)"
    r"|ない|違|他の|別の|もし|かも|二番|旧|아니|않|틀린|다른|만약|아마|두 번째|옛",
    re.IGNORECASE,
)
_CYRILLIC = re.compile(r"[\u0400-\u04ff]")
_ORDER = re.compile(rf"\b(?:{'|'.join(_OTHER.split())})\b", re.IGNORECASE)
_SUPERLATIVE = re.compile(r"\b(?:\w{3,}est|most|least|first|last)\b", re.IGNORECASE)
_ORDINAL = re.compile(
    r"\b(second|third|fourth|fifth|next)[ -](?=\w+est\b|most\b|least\b)", re.IGNORECASE
)
_NO_SUPERLATIVES = frozenset({"best", "honest", "interest", "request", "test", "west", "forest"})
_RETRACTING = re.compile(
    r"\b(?:wait|actually|however|but|sorry|correction|corrected|not|no|never|wrong|incorrect\w*|false|"
    r"mistake\w*|misspoke|instead|rather|hmm|or|maybe|perhaps|possibly|might|may|could|hold on|let me|"
    r"reconsider\w*|on second thought|unless|if|although|though|except|say|says|said|think\w*|claim\w*|"
    r"believe\w*|right|correct)\b|n't\b|[?？]|不|错|或|但|而是",
    re.IGNORECASE,
)
_NOT_BUT = re.compile(
    r"not [^,;.]{1,60}?,? but (?:rather )?(?P<value>[^,;.]{1,100})", re.IGNORECASE
)
_PLACE = re.compile(r"(?:on|in|at)\s+", re.IGNORECASE)
_CHOSEN = re.compile(
    r"\b(?:correct|right|best|final) (?:option|candidate|guess|possibility|hypothesis)\b|说法|說法",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(
    r"(?:suppose|assume|imagine|pretend|say|let(?:'s| us) (?:say|assume|suppose|pretend))\b"
    r"|假设|假如|如果",
    re.IGNORECASE,
)
_CLOSING = re.compile(
    r"\s*(?:i )?hope (?:this|that|it) (?:helps|is helpful)\W*\Z|\s*let me know if\b[^\n]{0,150}\Z"
    r"|\s*(?:feel free to ask|is there anything else)\b[^\n]{0,150}\Z",
    re.IGNORECASE,
)
_INTERJECTIONS_TEXT = "yes no wait hmm ok okay well right sure now so nein non sí si oui ja"
_INTERJECTIONS = frozenset(_INTERJECTIONS_TEXT.split())
_PRONOUNS_TEXT = "it this that he she they es er sie"
_PRONOUNS = frozenset(_PRONOUNS_TEXT.split())
_CONTRAST = re.compile(
    r"\s*[,;\u2014\u2013-]?\s+(?:and )?(?:not|rather than|instead of|nicht|(?:et )?(?:non|pas)|no|а не)"
    r"\s+(?P<denied>[^,;:]{1,80})\Z",
    re.IGNORECASE,
)
_FUNCTION_WORDS_TEXT = (
    "the of in for to on at with by from a an its this that their his her our my correct "
    "right final"
)
_FUNCTION_WORDS = frozenset(_FUNCTION_WORDS_TEXT.split())


def states(text: str, prompt: str, reference: str, means: Callable[[str, str], bool]) -> bool:
    """Returns whether the last sentence of a response states the reference.

    Args:
        text: The response without its thought, or the inside of its <answer>.
        prompt: As the model read it; empty if unknown.
        reference: The answer that is right, in words.
        means: Whether words mean the reference.
    """
    sentences = _sentences(_CLOSING.sub("", _plain(text)))
    num_inside = len(SENTENCE_END.findall(reference.strip().rstrip(".!?。！？")))  # St. Louis
    first = max(0, len(sentences) - 1 - num_inside)
    last = " ".join(sentences[first:])
    if not last or len(last) > _MAX_SENTENCE_CHARACTERS or last.endswith(("?", "？")):
        return False
    earlier = sentences[:first]
    if any(_SUPPOSED.match(sentence) for sentence in earlier):
        return False
    if _is_stated_before_remarks(sentences, prompt=prompt, reference=reference, means=means):
        return True
    lead_in = _lead_in(last)
    behind = last[len(lead_in) :].rstrip(" .!。！")
    is_conclusion = bool(lead_in.strip())
    if is_conclusion and means(behind, reference):
        return True
    if (answer := _IS_THE_ANSWER.fullmatch(behind)) is not None:
        return means(answer["value"], reference)
    in_words_of_question = answer_in_words_of(prompt, behind)
    if in_words_of_question is not None and means(in_words_of_question, reference):
        return True
    statement = _statement(behind, prompt)
    if statement is not None and _means_value(statement[1], reference, means):
        subject, _ = statement
        if prompt and not _may_be_asked(subject, prompt):
            return False
        if is_conclusion or not earlier or _is_asked(subject, prompt):
            return True
        return not any(_is_rival(sentence, subject) for sentence in earlier[-_MAX_STATEMENTS:])
    reverse = _REVERSED_STATEMENT.fullmatch(behind)
    if reverse is None or _is_other_subject(reverse["subject"], prompt):
        return False
    if prompt:
        is_answer = _is_asked(reverse["subject"], prompt)
    else:
        is_answer = is_conclusion or not earlier
    return is_answer and means(reverse["value"], reference)


def _means_value(value: str, reference: str, means: Callable[[str, str], bool]) -> bool:
    """Returns whether the value of a statement means the reference.

    "Ottawa, not Toronto", "not Toronto but Ottawa" and, for a day or a place, "on Friday" do.
    """
    value = without_contrast(value)
    not_but = _NOT_BUT.fullmatch(value)
    if not_but is not None:
        value = not_but["value"]
    return means(value, reference) or means(_PLACE.sub("", value, count=1), reference)


def _is_stated_before_remarks(
    sentences: list[str], prompt: str, reference: str, means: Callable[[str, str], bool]
) -> bool:
    """Returns whether a sentence answers what the prompt asks, and those behind it are remarks.

    They are none if one of them takes the answer back or doubts it, or states another value of the
    subject.
    """
    subject_of_answer = ""
    for sentence in sentences[-_MAX_STATEMENTS:]:
        if subject_of_answer and _RETRACTING.search(sentence):
            return False
        behind = sentence[len(_lead_in(sentence)) :].rstrip(" .!。！")
        statement = _statement(behind, prompt)
        if statement is None:
            continue
        subject, value = statement
        if subject.casefold() in _PRONOUNS:
            if subject_of_answer and _is_name(value) and not _means_value(value, reference, means):
                return False
        elif _is_asked(subject, prompt) and _may_be_asked(subject, prompt):
            if not _means_value(value, reference, means):
                return False
            subject_of_answer = subject
    return bool(subject_of_answer)


def without_contrast(value: str) -> str:
    """Returns a value without the other that it is contrasted with: "Ottawa, not Toronto"."""
    contrast = _CONTRAST.search(value)
    if contrast is None or re.search(r"\b(?:or|oder|ou|o)\b", contrast["denied"], re.IGNORECASE):
        return value
    if re.search(r"[,;]|\b(?:which|is|was|does|did|can|could|would)\b", value[: contrast.start()]):
        return value  # "Ottawa, which is not right"
    return value[: contrast.start()]


def _lead_in(sentence: str) -> str:
    """Returns the beginning of a sentence that says that it concludes: "So", "I think that"."""
    match = _LEAD_IN.match(sentence)
    return match[0] if match else ""


def _statement(sentence: str, prompt: str) -> tuple[str, str] | None:
    """Returns subject and value of a sentence such as "the capital is Ottawa", else None."""
    match = (
        _STATEMENT.match(sentence)
        or _CHINESE_STATEMENT.match(sentence)
        or _RUSSIAN_STATEMENT.fullmatch(sentence)
        or _JAPANESE_STATEMENT.fullmatch(sentence)
        or _KOREAN_STATEMENT.fullmatch(sentence)
    )
    if match is None:
        match = _BARE_STATEMENT.fullmatch(sentence)
        if match is None or not _is_asked(match["subject"], prompt):
            return None
    subject = match["subject"]
    if subject.casefold() not in _PRONOUNS and _is_other_subject(subject, prompt):
        return None
    return subject, match["value"]


def _is_other_subject(subject: str, prompt: str) -> bool:
    """Returns whether a subject denies, doubts, quotes or chooses among several.

    The second largest city does not if the prompt asks for the second largest city.
    """
    inside = subject
    if " " in subject and not _CYRILLIC.match(subject):
        inside = subject.partition(" ")[2]  # without its article
    asked = _words(prompt)
    inside = _ORDER.sub(lambda word: "" if word[0].casefold() in asked else word[0], inside)
    return _OTHER_SUBJECT.search(_CHOSEN.sub("", inside)) is not None


def _may_be_asked(subject: str, prompt: str) -> bool:
    """Returns False for the capital of another country, and for its largest city, if the prompt does
    not ask for them; the largest is not the second largest.
    """
    superlatives = _superlatives(subject)
    if not (_names(subject) | superlatives) <= _words(prompt):
        return False
    ordinals = {word.casefold() for word in _ORDINAL.findall(prompt)}
    return not superlatives or ordinals <= _words(subject)


def _superlatives(subject: str) -> set[str]:
    words = {word.casefold() for word in _SUPERLATIVE.findall(subject)}
    return words - _NO_SUPERLATIVES - _FUNCTION_WORDS


def _is_asked(subject: str, prompt: str) -> bool:
    """Returns whether the prompt has every word of a subject."""
    words = _words(subject)
    return bool(words) and words <= _words(prompt)


def _is_rival(sentence: str, subject: str) -> bool:
    """Returns whether an earlier sentence may be the answer.

    It may if it states something about another subject, or is a bare name.
    """
    if sentence.endswith(("?", "？")):
        return False
    statement = _statement(sentence[len(_lead_in(sentence)) :], "")
    if statement is not None:
        return _words(statement[0]) != _words(subject) and subject.casefold() not in _PRONOUNS
    return _is_name(sentence)


def _is_name(text: str) -> bool:
    """Returns whether a text is one to three capitalised words that are no interjection."""
    words = [word for word in re.findall(r"\w+", text) if word[:1].isupper()]
    is_name = 1 <= len(words) <= 3 and len(words) == len(re.findall(r"\w+", text))
    return is_name and words[0].casefold() not in _INTERJECTIONS


def _words(text: str) -> set[str]:
    """Returns the words of a text that carry a meaning; of Chinese, its characters."""
    lower = text.casefold().replace("\u2019", "'").replace("'s", "")
    return set(re.findall(r"[\u4e00-\u9fff]|[^\W_\u4e00-\u9fff]+", lower)) - _FUNCTION_WORDS


def _names(subject: str) -> set[str]:
    """Returns the capitalised words of a subject, but for its first if that is no possessive."""
    words = subject.split()
    if not words:
        return set()
    if not re.search(r"['\u2019]s?\b", words[0]):
        words = words[1:]
    return set().union(*(_words(word) for word in words if word[:1].isupper()))


def _plain(text: str) -> str:
    return _MARKUP.sub("", text)


def _sentences(text: str) -> list[str]:
    """Returns the sentences of a text, each with the mark that ends it."""
    sentences: list[str] = []
    begin = 0
    ends = [end.end() for end in SENTENCE_END.finditer(text)]
    for end in [*ends, len(text)]:
        sentence = _LIST_MARK.sub("", text[begin:end].strip(), count=1).strip()
        if re.search(r"[^\W\d_]|\d{3}", sentence):
            sentences.append(sentence)
        begin = end
    return sentences
