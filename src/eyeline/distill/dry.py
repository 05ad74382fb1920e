"""`--dry N`: ask for a few samples, show the verdicts, and say what all of them would take. Nothing is written."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from eyeline.core.errors import Refused
from eyeline.core.words import counted, duration, percent
from eyeline.distill.ask import Answered, Asker, Outcome
from eyeline.distill.job import Student, all_rows, asker_of
from eyeline.distill.prompts import question_text, true_answer
from eyeline.distill.settings import Distill, Price
from eyeline.distill.teacher import Said
from eyeline.offline.run import Where

SHOWN = 600  # characters of an answer


def dry_run(settings: Distill, student: Student, count: int, where: Where, say: Callable[[str], None]) -> None:
    """Ask for `count` samples from all over the sources, and print each answer with its verdict, then what all would take."""
    asker = asker_of(settings, student)
    rows = list(all_rows(asker))
    if not rows:
        raise Refused("the sources of distill have no sample left after categories and limit")
    count = min(count, len(rows))
    chosen = [rows[n * len(rows) // count] for n in range(count)]
    try:
        start = time.monotonic()
        outcomes = asker.outcomes(chosen)
        seconds = time.monotonic() - start
    finally:
        asker.teacher.close()
    for one in outcomes:
        for line in shown(one, asker):
            say(line)
    for line in estimate(outcomes, len(rows), seconds, settings, max(where.workers, 1) * where.shards):
        say(line)


def shown(one: Outcome, asker: Asker) -> list[str]:
    """A sample, its answers and their verdicts, in words."""
    if one.sample is None:
        return [f"--- {one.id}: not asked: {one.bad}"]
    lines = [f"--- {one.id}: {_short(question_text(one.sample))} (true answer: {_short(true_answer(one.sample))})"]
    return lines + [line for answer in one.answers for line in _answer_lines(answer, asker)]


def _answer_lines(answer: Answered, asker: Asker) -> list[str]:
    said = answer.said
    seed = f", seed {answer.seed}" if asker.teacher.keeps_seeds else ""
    tokens = " + ".join("?" if count is None else str(count) for count in (said.prompt_tokens, said.answer_tokens)) + " tokens"
    verdict = "kept" if answer.cause is None else f"rejected: {answer.cause}{f' ({said.why})' if said.why else ''}"
    head = f"[{answer.prompt} {answer.n}] {verdict}; answer: {answer.found.answer!r}; {tokens}{seed}"
    text = "\n".join(filter(None, [said.reasoning, said.text]))
    return [head, *(f"    {line}" for line in _short(text, SHOWN).splitlines())]


def _short(text: str, most: int = 160) -> str:
    text = text.strip()
    return text if len(text) <= most else f"{text[:most]} …"


def estimate(outcomes: Sequence[Outcome], total: int, seconds: float, settings: Distill, workers: int) -> list[str]:
    """What was kept of the samples that were asked, and tokens, time and cost of all."""
    answers = [answer for one in outcomes for answer in one.answers]
    causes = Counter(one.cause or "kept" for one in outcomes)
    by_answer = Counter(answer.cause or "kept" for answer in answers)
    kept, share = causes["kept"], causes["kept"] / len(outcomes)
    listed = ", ".join(f"{number} {cause}" for cause, number in by_answer.most_common())
    lines = [
        f"{kept} of {counted(len(outcomes), 'sample')} ({percent(share)}) would be kept",
        f"{counted(len(answers), 'answer')}: {listed or 'none'}",
        f"all {counted(total, 'sample')}: {total * settings.answers_per_sample:,} requests, about {round(total * share):,} samples kept",
    ]
    scale = total / len(outcomes)
    lines.append(_tokens([answer.said for answer in answers if answer.said.finish != "failed"], scale, settings.price))
    each = f"{counted(workers, 'worker')} as this one" if workers > 1 else "one worker"
    lines.append(f"time: about {duration(seconds * scale / workers)} with {each} ({seconds:.1f} s for {counted(len(outcomes), 'sample')})")
    return lines


def _tokens(said: Sequence[Said], scale: float, price: Price) -> str:
    measured = [one for one in said if one.prompt_tokens is not None and one.answer_tokens is not None]
    if not measured:
        return "tokens: the server does not say how many there are, so neither they nor the cost can be estimated"
    scale *= len(said) / len(measured)
    prompt, answer = (sum(getattr(one, name) for one in measured) * scale for name in ("prompt_tokens", "answer_tokens"))
    cost = (prompt * price.prompt + answer * price.answer) / 1e6
    what = f"about {cost:,.2f} {price.currency}" if price.prompt or price.answer else "unknown: distill.price is not set"
    return f"tokens: about {prompt:,.0f} of prompts and {answer:,.0f} of answers; cost: {what}"
