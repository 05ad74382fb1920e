"""The frame and elements of every page: one self-contained file without script, in which nothing from data is anything but text.

A page sends each string of a file through `words`, and each image through `image`.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from eyeline.core.log import visible

EMBEDDED_IMAGE = re.compile(
    r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+"
)  # the only kind of image that a page embeds, apart from our plots

PHONE = 46  # characters side by side on a narrow page; a wider table becomes a list there
SHORT_CELL = 24  # characters that stay on one line

NARROW = "40rem"  # pages up to this width are laid out for a phone

CSS = """
:root { color-scheme: light dark; --ink: #1d1f23; --soft: #5c6068; --line: #e5e6e9; --paper: #fff; --panel: #f6f7f8; --good: #00694d;
        --bad: #a63f00; --supervised: #d3efe2; --image: #dbe8f6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dcdee2; --soft: #9a9ea7; --line: #34373d; --paper: #17181b; --panel: #202226; --good: #5cc9a4; --bad: #f0a06a;
          --supervised: #1d4a3a; --image: #23405c; } }
body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 60rem; margin: 2.5rem auto 4rem; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.8rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.9rem 0 .4rem; }
p.note { color: var(--soft); margin: .25rem 0 .6rem; max-width: 46rem; overflow-wrap: anywhere; }
p.warning { margin: .5rem 0; padding: .5rem .8rem; border-left: 3px solid var(--bad); background: var(--panel); overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .4rem 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); } td.n, td.s { white-space: nowrap; }
td.w { overflow-wrap: anywhere; }
td.n, th.n { text-align: right; }
dl.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .9rem 1.2rem; margin: 1.2rem 0; }
dl.figures dt { color: var(--soft); font-size: .85rem; } dl.figures dd { margin: 0; font-size: 1.35rem; font-weight: 600; }
.stage { border: 1px solid var(--line); border-radius: 6px; padding: .7rem 1rem; margin: .8rem 0; } .stage h3 { margin: 0 0 .4rem; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; font-size: .92rem;
           font-variant-numeric: tabular-nums; }
dl.facts dt { color: var(--soft); } dl.facts dd { margin: 0; overflow-wrap: anywhere; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--soft); }
figure { margin: .6rem 0 1.2rem; } figure img { width: 100%; } figcaption { color: var(--soft); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); gap: .2rem 1.4rem; margin: .8rem 0; }
.plots .stage { border: 1px solid var(--line); border-radius: 6px; padding: .7rem 1rem; margin: .8rem 0; } .stage h3 { margin: 0 0 .4rem; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; font-size: .92rem;
           font-variant-numeric: tabular-nums; }
dl.facts dt { color: var(--soft); } dl.facts dd { margin: 0; overflow-wrap: anywhere; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--soft); }
figure { margin: 0; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(14.5rem, 1fr)); gap: 1.1rem; }
.sample { border: 1px solid var(--line); border-radius: 6px; padding: .7rem .8rem; overflow-wrap: anywhere; }
.sample img { width: 100%; max-height: 13rem; object-fit: contain; image-rendering: auto; background: var(--panel); }
.sample p { margin: .35rem 0; white-space: pre-wrap; } .right { color: var(--good); } .wrong { color: var(--bad); }
.seen { border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem; margin: .9rem 0; overflow-wrap: anywhere; }
.seen img { height: 6.5rem; max-width: 100%; object-fit: contain; margin: 0 .6rem .5rem 0; border-radius: 3px; background: var(--panel); }
.seen p { margin: 0; } .seen p.text { white-space: pre-wrap; font: .87rem/1.6 ui-monospace, Menlo, Consolas, monospace; }
.seen b { font-weight: inherit; background: var(--supervised); border-radius: 3px; padding: .08rem 0; }
.seen i { font-style: normal; background: var(--image); border-radius: 3px; padding: .08rem .25rem; }
@media (max-width: NARROW) {
  body { margin-top: 1.2rem; padding: 0 .8rem; } td.s { white-space: normal; overflow-wrap: anywhere; }
  table { font-size: .82rem; } th, td { padding-right: .6rem; }
  dl.facts { grid-template-columns: 1fr; gap: 0; } dl.facts dd { margin-bottom: .35rem; }
  .stacked tr { display: block; padding: .35rem 0; border-bottom: 1px solid var(--line); } .stacked tr.head { display: none; }
  .stacked td, .stacked td.n { display: block; text-align: left; padding: .05rem 0; border: 0; white-space: normal; }
  .stacked td::before { content: attr(data-label) ": "; color: var(--soft); } .stacked td:not([data-label])::before { content: ""; } }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .8rem; overflow-x: auto; font-size: .84rem; }
""".replace("NARROW", NARROW)


def document(title: str, sections: Iterable[str]) -> str:
    """The page, of HTML that is safe already."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{words(title)} · Eyeline</title>'
    # the policy makes a browser refuse what the page promises not to have: scripts, and anything fetched
    head += "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
    body = "\n".join(sections)
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{CSS}</style></head>\n<body>\n{body}\n</body></html>\n'


def words(text: str) -> str:
    """Any text as text: no mark-up in it, and what cannot be seen (control characters, changes of direction) spelt out."""
    return escape(visible(text))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: int | None = None) -> str:
    """An HTML table of any cells. Columns from `numbers` on are aligned as numbers. On a narrow page a table with too much for its width
    becomes a list: the cells of a row one below the other, each behind the name of its column."""
    rows = [[str(cell) for cell in row] for row in rows]
    stacked = bool(head) and _characters(head, rows, numbers) > PHONE

    def css(n: int, text: str) -> str:
        if numbers is not None and n >= numbers:
            return ' class="n"'
        if len(text) <= SHORT_CELL:
            return ' class="s"'
        return ' class="w"' if max(map(len, text.split()), default=0) > SHORT_CELL else ""  # a path, say: it may break anywhere

    def cells(tag: str, values: Sequence[object]) -> str:
        labels = [f' data-label="{words(name)}"' if stacked and name and tag == "td" else "" for name in (*head, *[""] * len(values))]
        texts = enumerate(map(str, values))
        return "".join(f"<{tag}{css(n, text)}{labels[n]}>{words(text)}</{tag}>" for n, text in texts)

    top = f'<tr class="head">{cells("th", head)}</tr>' if head else ""
    body = "".join("<tr>" + cells("td", row) + "</tr>" for row in rows)
    tag = '<table class="stacked">' if stacked else "<table>"
    return f'<div class="wide">{tag}{top}{body}</table></div>'


def _characters(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int | None) -> int:
    """The minimum width of a table: numbers stay on one line, and text may wrap at 12 characters."""
    wide = 0
    for n, name in enumerate(head):
        longest = max((len(row[n]) for row in rows if n < len(row)), default=0)
        words_of = max(map(len, name.split()), default=0)
        wide += max(words_of, longest if numbers is not None and n >= numbers else min(longest, 12)) + 2
    return wide


def figures_list(shown: Mapping[str, str]) -> str:
    """A few large figures, each under its name."""
    items = "".join(f"<div><dt>{words(k)}</dt><dd>{words(v)}</dd></div>" for k, v in shown.items())
    return f'<dl class="figures">{items}</dl>'


def facts(shown: Mapping[str, str]) -> str:
    """Names and what they are, a line each; one below the other where the page is narrow."""
    items = "".join(f"<dt>{words(k)}</dt><dd>{words(v)}</dd>" for k, v in shown.items())
    return f'<dl class="facts">{items}</dl>'


def collapsible(title: str, body: str) -> str:
    """HTML that is safe already, behind a title that opens it."""
    return f"<details><summary>{words(title)}</summary>{body}</details>"


def note(text: str) -> str:
    return f'<p class="note">{words(text)}</p>'


def warning(text: str) -> str:
    return f'<p class="warning">{words(text)}</p>'


def figure(svg: str, caption: str, narrow: str | None = None) -> str:
    """An SVG as an image: isolated, so that ids of two plots never meet and nothing in it could run. `narrow` is shown on a narrow page."""
    wide, small = (f"data:image/svg+xml;base64,{base64.b64encode(one.encode()).decode()}" if one else "" for one in (svg, narrow))
    image = f'<img alt="{words(caption)}" src="{wide}">'
    if small:
        image = f'<picture><source media="(max-width: {NARROW})" srcset="{small}">{image}</picture>'
    return f"<figure>{image}<figcaption>{words(caption)}</figcaption></figure>"


def image(jpeg: bytes) -> str:
    """A JPEG that was made here."""
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}">'


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def metric(value: float) -> str:
    """The value with a metric prefix: 1.23 T."""
    power = max(0, min(6, (len(str(int(value))) - 1) // 3))
    return f"{value / 1000**power:.3g} {' kMGTPE'[power]}".strip()
