"""What an answer says, and whether it is accepted. Pure functions of texts.

Each cause of a rejection is a key of CAUSES; the first one that applies counts.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from eyeline.distill.settings import Accept, Filters
from eyeline.distill.teacher import Said
from eyeline.evals.metric import normalise_answer

CAUSES = {
    "request_refused": "the server refused this request: its message is in the row",
    "filtered": "the server's own filter ended the answer",
    "cut": "the answer was cut at max_new_tokens",
    "refusal": "the teacher declines to answer",
    "no_answer": "no line with a final answer",
    "no_question": "the prompt asks for another wording of the question, and there is none",
    "other_script": "most letters are of another script than the question's",
    "leak": "the rationale repeats the prompt, or says that it was given the answer",
    "too_short": "the rationale has fewer words than filters.min_words",
    "too_long": "the rationale has more words than filters.max_words",
    "repetition": "the rationale repeats itself",
    "image_not_mentioned": "the sample has an image, and the rationale does not speak of it",
    "wrong": "the final answer is not the sample's",
    "minority": "the final answer is not what most answers to the sample are",
    "duplicate": "the same text as an accepted answer to the same sample",
    "surplus": "as many answers to this sample are kept already",
}


@dataclass(frozen=True)
class Parsed:
    """An answer in its parts."""

    rationale: str
    answer: str | None
    question: str | None = None  # in other words


def parsed(said: Said, marker: str, rewrites_question: bool = False) -> Parsed:
    """The parts of an answer: the final answer follows the last `marker` (without one, it is all of the text); what is before it, and what
    is between <think> and </think>, is the rationale."""
    reasoning, text = said.reasoning.strip(), said.text.strip()
    if "</think>" in text:
        before, _, text = text.rpartition("</think>")
        reasoning = "\n".join(filter(None, [reasoning, before.replace("<think>", "").strip()]))
        text = text.strip()
    question = None
    if rewrites_question and (found := re.search(r"^[ \t*#>]*Question:[ \t*]*(.+?)[ \t*]*$", text, re.MULTILINE | re.IGNORECASE)):
        question = found[1].strip()
        text = (text[: found.start()] + text[found.end() :]).strip()
    if not marker:
        return Parsed(reasoning, text or None, question)
    places = list(re.finditer(rf"[*_#`]*{re.escape(marker)}[*_`]*", text, re.IGNORECASE))
    if not places:
        return Parsed("\n\n".join(filter(None, [reasoning, text])), None, question)
    before, after = text[: places[-1].start()].strip(), text[places[-1].end() :].strip()
    answer = bare_answer(after)
    return Parsed("\n\n".join(filter(None, [reasoning, before])), answer or None, question)


def bare_answer(text: str) -> str:
    """The first line of a final answer, without marks around it."""
    line = next(iter(text.splitlines()), "").strip()
    boxed = re.fullmatch(r"\$?\\boxed\{(.*)\}\$?\.?", line)
    line = boxed[1] if boxed else line
    for mark in ("**", "__", "`", '"', "*"):
        inner = line.removesuffix(".").removesuffix(mark)
        if inner != line.removesuffix(".") and (line.startswith(mark) or mark not in inner):  # the other half is before the marker
            line = inner.removeprefix(mark).strip()
    return line


# Filters


_REFUSALS = re.compile(
    r"\bI(?:'m| am) (?:really |very )?(?:sorry|afraid)\b"
    r"|\bI (?:can(?:no|')t|am (?:not able|unable) to|won't) (?:help|assist|answer|see|view|provide|comply|identify)"
    r"|\bas an AI\b|\bI (?:do not|don't) have the ability\b|\bagainst my (?:guidelines|policy)\b",
    re.IGNORECASE,
)
_GIVEN_AWAY = re.compile(
    r"\b(?:the|your) (?:given|provided|supplied|reference|expected|ground[- ]truth) (?:final )?answer\b|\bas (?:instructed|requested)\b"
    r"|\bthe (?:instructions?|prompt) (?:say|says|ask|asks|state|states)\b",
    re.IGNORECASE,
)
_IMAGE_WORDS = re.compile(
    r"\b(?:images?|photo(?:s|graphs?)?|pictur\w+|shown|shows?|see|seen|visible|depict(?:s|ed)?|scene|diagram|chart|figure|screenshot"
    r"|foreground|background|left|right|top|bottom|corner)\b",
    re.IGNORECASE,
)
LEAKED_WORDS = 8  # of the instructions, in a row
RUN = 4  # words of a run that may be repeated


def flaw(said: Said, found: Parsed, filters: Filters, question: str, instructions: str, images: int, rewrites: bool) -> str | None:
    """The first cause, other than its final answer, that an answer is rejected for."""
    match said.finish:
        case "failed":
            return said.cause or "request_refused"
        case "filtered":
            return "filtered"
        case "length":
            return "cut"
        case "stop":
            pass
    rationale, whole = found.rationale, f"{found.rationale}\n{found.answer or ''}"
    words = rationale.split()
    checks = (
        ("refusal", filters.refusals and _REFUSALS.search(whole[:400]) is not None),
        ("no_answer", found.answer is None),
        ("no_question", rewrites and not found.question),
        ("other_script", filters.same_script and other_script(whole, question)),
        ("leak", filters.leaks and leaks(rationale, instructions, question)),
        ("too_short", len(words) < filters.min_words),
        ("too_long", len(words) > filters.max_words),
        ("repetition", repetition(words) > filters.max_repetition),
        ("image_not_mentioned", filters.mentions_image and images > 0 and _IMAGE_WORDS.search(rationale) is None),
    )
    return next((cause for cause, applies in checks if applies), None)


def script(text: str) -> str | None:
    """The script that most letters of a text are of. None without letters."""
    letters = Counter(unicodedata.name(c, "?").split()[0] for c in text[:20_000] if c.isalpha())
    joined: Counter[str] = Counter()
    for name, count in letters.items():
        joined[_EAST_ASIAN.get(name, name)] += count
    return joined.most_common(1)[0][0] if joined else None


_EAST_ASIAN = {"CJK": "CJK", "HIRAGANA": "CJK", "KATAKANA": "CJK", "FULLWIDTH": "LATIN"}  # Japanese mixes them


def other_script(text: str, question: str) -> bool:
    """Return whether a text is written in another script than the question."""
    ours, theirs = script(text), script(question)
    return ours is not None and theirs is not None and ours != theirs


def leaks(rationale: str, instructions: str, question: str) -> bool:
    """Return whether a rationale repeats the prompt's instructions word for word, or speaks of an answer that it was given."""
    if _GIVEN_AWAY.search(rationale) and not _GIVEN_AWAY.search(question):
        return True
    said = _plain_words(rationale)
    wanted = {tuple(said[n : n + LEAKED_WORDS]) for n in range(len(said) - LEAKED_WORDS + 1)}
    told = _plain_words(instructions)
    return any(tuple(told[n : n + LEAKED_WORDS]) in wanted for n in range(len(told) - LEAKED_WORDS + 1))


def _plain_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def repetition(words: Sequence[str]) -> float:
    """The share of runs of RUN words that are not their first."""
    runs = [tuple(words[n : n + RUN]) for n in range(len(words) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


# Final answers


def agree(one: str, other: str, accept: Accept) -> bool:
    """Return whether an answer (`one`) means the same as another, the true one."""
    match accept.compare:
        case "exact":
            return one == other
        case "normalised":
            return normalise_answer(one) == normalise_answer(other)
        case "number":
            ours, theirs = number_in(one), number_in(other)
            return ours is not None and theirs is not None and abs(ours - theirs) <= accept.tolerance * abs(theirs)
        case "choice":
            ours, theirs = letter_in(one), letter_in(other)
            return ours is not None and ours == theirs


_NUMBER = re.compile(r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?|[-+−]?\.\d+", re.IGNORECASE)
_SPELLED = dict(zip(
    ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
     "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
    range(21), strict=True,
))  # fmt: skip


def number_in(text: str) -> float | None:
    """The only number in a text, in digits or as a word up to twenty; a percent sign divides by 100. None where there is none, or
    several."""
    found = _NUMBER.findall(text)
    if len(found) == 1:
        value = float(found[0].replace(",", "").replace("−", "-"))
        return value / 100 if re.search(r"\d\s*%", text) else value
    spelled = [_SPELLED[word] for word in re.findall(r"[a-z]+", text.casefold()) if word in _SPELLED]
    return float(spelled[0]) if not found and len(spelled) == 1 else None


_LETTER = re.compile(r"\(?\[?\b([A-Za-z])\b(?:[).:\]]|\s*$)")


def letter_in(text: str) -> str | None:
    """The letter of an option that a text begins with: `B`, `(b)`, `B. a cat`, `option B`."""
    found = _LETTER.match(re.sub(r"^\W*(?:the )?(?:answer is|option|choice)\s+", "", text.strip(), flags=re.IGNORECASE))
    return found[1].upper() if found else None


def majority(answers: Sequence[str], accept: Accept) -> str | None:
    """The answer that more than `min_share` of them agree with; None without one."""
    groups: list[list[str]] = []
    for answer in answers:
        home = next((group for group in groups if agree(answer, group[0], accept)), None)
        if home is None:
            groups.append([answer])
        else:
            home.append(answer)
    best = max(groups, key=len, default=[])
    return best[0] if len(best) > accept.min_share * len(answers) else None


def verdicts(flaws: Sequence[str | None], found: Sequence[Parsed], truth: str, accept: Accept, keep: int) -> list[str | None]:
    """The cause that each answer to one sample is rejected for; None for those that are kept, the first ones."""
    voting = [one.answer for one, cause in zip(found, flaws, strict=True) if cause is None and one.answer is not None]
    wanted = {"truth": truth, "majority": majority(voting, accept), "any": None}[accept.by]
    out: list[str | None] = []
    kept: set[tuple[str, str, str]] = set()
    for cause, one in zip(flaws, found, strict=True):
        text = (one.question or "", one.rationale, one.answer or "")
        if cause is None and accept.by != "any" and (wanted is None or not agree(one.answer or "", wanted, accept)):
            cause = "wrong" if accept.by == "truth" else "minority"
        if cause is None and text in kept:
            cause = "duplicate"
        if cause is None and len(kept) == keep:
            cause = "surplus"
        if cause is None:
            kept.add(text)
        out.append(cause)
    return out
