"""How `make docs` builds the site. A warning, such as a link or an anchor that leads nowhere, fails it."""

from pygments.lexers import JsonLexer, TextLexer
from sphinx.application import Sphinx

project = "Eyeline"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Eyeline"
html_show_sourcelink = False
exclude_patterns = ["README.md"]  # what leads through the pages where they are read as files; index.md includes it
myst_heading_anchors = 4


def setup(app: Sphinx) -> None:
    app.add_lexer("jsonl", JsonLexer)
    app.add_lexer("csv", TextLexer)
