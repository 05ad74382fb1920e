"""YAML as settings need it: every plain word has one meaning, and what YAML 1.1 would read in a surprising way stays text.

PyYAML follows YAML 1.1, where `010` is 8, `1:30` is 90, `on` is true and `1e-3` is text. Here numbers are decimal, booleans are
`true` and `false`, null is `null`, and everything else is text exactly as it is written. A setting that wants a number then refuses
the text by name, instead of training with another number.
"""

import re
from typing import Any, ClassVar

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from eyeline.core.errors import Refused

MAX_NODES = 20_000  # aliases counted each time they are used: a recipe needs hundreds, an alias bomb has billions

# What PyYAML raises: its own errors, and those of Python for deep nesting and for tags whose value does not fit (`!!int x`)
_FAULTS = (yaml.YAMLError, ValueError, AttributeError, RecursionError)

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:_[0-9]{3})+)\Z")  # 10_000 is a number where it groups thousands
_FLOAT = re.compile(
    r"(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar = {}


class _Dumper(yaml.SafeDumper):
    """Quotes what either reading would take for something else than text, so that other YAML readers agree."""

    yaml_implicit_resolvers: ClassVar = {first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()}

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True


def _represent_text(dumper: _Dumper, text: str) -> ScalarNode:
    """PyYAML folds these line separators to a space in any style but double quotes."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if set(text) & set("\x85\u2028\u2029") else None)


_Dumper.add_representer(str, _represent_text)
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF"))
    _kind.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:null|Null|NULL|)\Z"), ["n", "N", ""])
    _kind.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<\Z"), ["<"])


def read_yaml(text: str, where: str) -> Any:
    """The value that a YAML text holds. Refused, naming `where` and the line: what is not YAML, a key that is given twice (YAML itself
    lets the last one win), a key without a value, `~`, tags that make objects, and aliases that unfold to a huge value."""
    try:
        loader = _Loader(text)  # a SafeLoader with other words for numbers
        node = loader.get_single_node()
        if node is None:
            return None
        _examine(node, where)
        return loader.construct_document(node)
    except _FAULTS as error:
        raise Refused(f"{where} is not valid YAML: {_fault(error)}") from error


def write_yaml(value: Any) -> str:
    """YAML text that `read_yaml` reads back to the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _fault(error: Exception) -> str:
    """The YAML error in one line, with the line number where YAML's reader knows it."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None)
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if mark is None or not problem:
        return " ".join(str(error).split()).replace(' in "<unicode string>"', "").replace('"<unicode string>"', "the text")
    hint = _HINTS.get(problem, "")
    return f"line {mark.line + 1}, character {mark.column + 1}: {problem}{hint}"


_HINTS = {  # what a YAML reader says, and what people usually did
    "could not find expected ':'": ": a key has no colon after it, or a line is not indented as its neighbours are",
    "mapping values are not allowed here": ": the line above has no colon after its key, or a text with a colon is not in quotes",
    "found character '\\t' that cannot start any token": ": indent with spaces, not with tabs",
}


def _examine(root: Node, where: str) -> None:
    count = 0
    waiting = [root]
    while waiting:
        count += 1
        if count > MAX_NODES:
            raise Refused(f"{where} unfolds to more than {MAX_NODES:,} values; its aliases (*name) repeat too much")
        node = waiting.pop()
        if isinstance(node, MappingNode):
            _refuse_duplicate(node, where)
            for key, value in node.value:
                _refuse_empty(value, where, str(key.value))
            waiting += [child for pair in node.value for child in pair]
        elif isinstance(node, SequenceNode):
            for item in node.value:
                _refuse_empty(item, where, "an item of a list")
            waiting += node.value


def _refuse_duplicate(node: MappingNode, where: str) -> None:
    keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
    twice = sorted({key for key in keys if keys.count(key) > 1 and key != "<<"})
    if twice:
        raise Refused(f"{where}, line {node.start_mark.line + 1}: {twice[0]!r} is given twice in one place. Keep one of them")


def _refuse_empty(node: Node, where: str, name: str) -> None:
    if not isinstance(node, ScalarNode) or node.style is not None:
        return
    if node.value == "":
        raise Refused(f"{where}, line {node.start_mark.line + 1}: {name} has no value. Give it one, write null for none, or remove it")
    if node.value == "~":
        raise Refused(f"{where}, line {node.start_mark.line + 1}: {name} is ~. Write null for none, or ~/ for the home folder")
