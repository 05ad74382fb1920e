"""One word per meaning: words that the project no longer uses. A new one goes into BANNED once the last use is gone."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BANNED = {  # a word -> the one to use
    r"(?:\b|_)pictures?(?:\b|_)": "image",
    r"(?:\b|_)films?(?:\b|_)": "video",
    r"\bin vain\b": "unused",
    r"\bseams?\b": "replaceable submodule",
    r"\bmend(s|ed|ing)?\b": "fix, or repair",
    r"\b(lies|lie|lay)\b": "is stored, is located, is",
    r"\bbeside\b": "next to, with, in addition to; sidecar",
    r"\bgo(es|ing)? on\b": "resumes, continues",
    r"\bthoughts\b": "reasoning",
    r"\bnobody\b|\b(some|any|every)body\b|\bwho(m)?ever\b": "name the process, the user or the function",
    r"\bjudg(e|es|ed|ing)\b": "validation, evaluation; check",
    r"\banew\b": "again",
    r"\bin silence\b|\bwithout a word\b": "silently",
    r"\bwithout looking\b|\bblind (prior|baseline)\b": "text-only, independent of",
    r"\bstretch(es)?\b": "RoPE scaling; a run, a part",
    r"\ball the same\b": "still",
    r"\btwins?\b": "duplicates; peer, copy",
    r"(?:\b|_)medium(?:\b|_)": "media item",
    r"\bmatrix units\b": "tensor cores",
    r"\"\"\"(Of|By) ": "start with a verb, or with the noun that is described",
}
ALLOWED = {  # file -> what it may still hold: names that others gave, or that something had
    "CHANGELOG.md": r"`film`|`picture_without_tower`",
    "docs/kubernetes/train.yaml": r"medium: Memory",
    "docs/recipes.md": r"vision\.film_(least|most)|language\.stretch",
    "docs/words.md": r"blind baseline",
    "docs/your-data.md": r"meta\.picture",
    "src/eyeline/core/aliases.py": r"vision\.film_(least|most)|language\.stretch",
    "src/eyeline/data/sources/naming.py": r"\|picture\||\|pictures\?\|",
    "src/eyeline/study/page.py": r"</?picture>",
    "tests/checkpoint/test_faults.py": r"the user nobody",
    "tests/data/test_native.py": r"no pictures\?",
    "tests/data/test_unread.py": r"<picture>",
    "tests/distill/test_job.py": r'"pictures"|pictures/',
    "tests/recipes/test_check.py": r"pictures/|~nobody-of-that-name",
    "tests/study/test_data_page.py": r"pictures/",
    "tests/test_settings_live.py": r'"pictures"|"nobody"',
    "tests/train/recipe.py": r'"pictures"|pictures/',
    "tests/train/test_rejects.py": r'"pictures"',
    "tests/train/test_user_code.py": r'"pictures"',
}


@cache
def files() -> list[str]:
    folders = [path for name in ("src", "tests", "docs") for path in (ROOT / name).rglob("*")]
    found = [path for path in [*folders, *ROOT.glob("*.md")] if path.suffix in (".py", ".md", ".yaml")]
    return sorted(str(path.relative_to(ROOT)) for path in found if path.name != Path(__file__).name)


@cache
def lines_of(name: str) -> list[str]:
    """Without what is allowed there."""
    return [re.sub(ALLOWED.get(name, r"(?!)"), "", line) for line in (ROOT / name).read_text().splitlines()]


@cache
def text_of(name: str) -> str:
    return "\n".join(lines_of(name))


@pytest.mark.parametrize("banned", BANNED)
def test_no_file_uses_a_banned_word(banned: str) -> None:
    word = re.compile(banned, re.IGNORECASE)
    lines = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name in files()
        if word.search(text_of(name))
        for number, line in enumerate(lines_of(name), 1)
        if word.search(line)
    ]
    assert not lines, f"say {BANNED[banned]}:\n" + "\n".join(lines)


def test_what_is_allowed_is_there() -> None:
    assert not [name for name, allowed in ALLOWED.items() if not re.search(allowed, (ROOT / name).read_text())]


def test_shares_times_and_sizes_are_formatted_in_one_file() -> None:
    elsewhere = re.compile(r":[^{}'\"]*%\}|2 ?\*\* ?30:|divmod\([^)]*\), 60\)")
    found = [name for name in files() if name.startswith("src/") and elsewhere.search((ROOT / name).read_text())]
    assert found == ["src/eyeline/core/words.py"]
