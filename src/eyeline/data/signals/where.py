"""`where:` of a source: a small expression over the columns of its signals, which says which rows are used.

    width >= 224 and not duplicate
    script in ["latin", "cyrillic"] and (images == 0 or sharpness > 50)

It is parsed by Python's own parser and evaluated here, over whole columns: names, numbers, texts, comparisons, `and`, `or`, `not`,
`in`, and arithmetic. Nothing else is accepted, and nothing is ever executed. A text is true when it is not empty. A comparison is false
where a row has no value: a row without images has no width.
"""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyeline.core.errors import nearest
from eyeline.data.signals.columns import COLUMNS, SCORE, Kind, Table

LONGEST, DEEPEST = 2000, 40  # characters, and levels of nesting
ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.Mod: np.mod,
}
COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
EXAMPLE = "width >= 224 and not duplicate"
ACCEPTED = "names of columns, numbers, texts, comparisons, and, or, not, in [...], + - * / %"


@dataclass(frozen=True)
class Where:
    """An expression that was checked."""

    text: str

    @property
    def columns(self) -> list[str]:
        """Those that it names."""
        return sorted({node.id for node in ast.walk(_tree(self.text)) if isinstance(node, ast.Name)})

    def mask(self, table: Table) -> NDArray[np.bool_]:
        """Which rows of a table it is true of."""
        rows = len(next(iter(table.values())))
        with np.errstate(all="ignore"):  # a division by zero is infinite, or no value
            return np.broadcast_to(_true(_value(_tree(self.text), table)), rows).copy()


def where_of(text: str) -> Where:
    """The expression in a text. ValueError, with what is accepted, for any other."""
    kind = _kind(_tree(text), 0)
    if kind == "number":
        raise ValueError(f"{text!r} is a number, and rows are chosen by what is true or false. Compare it: {text} > 0")
    return Where(text)


def _tree(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise ValueError(f"the expression has {len(text):,} characters, over {LONGEST:,}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"got {text!r:.200}, wanted an expression such as {EXAMPLE}. Accepted are {ACCEPTED}") from error


# Checked: what kind of value each piece has


def _kind(node: ast.expr, depth: int) -> Kind:
    if depth > DEEPEST:
        raise ValueError(f"the expression is nested over {DEEPEST} levels deep")
    match node:
        case ast.Name(name):
            return _kind_of_column(name)
        case ast.Constant(bool()):
            return "flag"
        case ast.Constant(int() | float() as number):
            return _kind_of_number(number)
        case ast.Constant(str()):
            return "text"
        case ast.UnaryOp(ast.Not(), operand):
            return _require(operand, ("flag", "text"), depth)
        case ast.UnaryOp(ast.USub() | ast.UAdd(), operand):
            _require(operand, ("number",), depth)
            return "number"
        case ast.BoolOp(_, values):
            for value in values:
                _require(value, ("flag", "text"), depth)
            return "flag"
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            _require(left, ("number",), depth)
            _require(right, ("number",), depth)
            return "number"
        case ast.Compare(left, ops, comparators):
            _check_comparison([left, *comparators], ops, depth)
            return "flag"
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not accepted. Accepted are {ACCEPTED}")


def _kind_of_column(name: str) -> Kind:
    found = COLUMNS.get(name)
    if found is None:
        meant = SCORE if "similar" in name.lower() or "clip" in name.lower() else name
        raise ValueError(f"there is no column {name!r}.{nearest(meant, list(COLUMNS))} Columns: {', '.join(COLUMNS)}")
    return found.kind


def _kind_of_number(number: float) -> Kind:
    try:
        float(number)
    except OverflowError as error:
        raise ValueError("a number is too large") from error
    return "number"


def _require(node: ast.expr, wanted: tuple[Kind, ...], depth: int) -> Kind:
    kind = _kind(node, depth + 1)
    if kind not in wanted:
        text = ast.unparse(node)
        if kind == "number":
            raise ValueError(f"{text!r} is a number, where something true or false is wanted. Compare it: {text} > 0")
        raise ValueError(f"{text!r} is {'a text' if kind == 'text' else 'true or false'}, where a number is wanted")
    return "flag" if "flag" in wanted else kind


def _check_comparison(values: list[ast.expr], ops: list[ast.cmpop], depth: int) -> None:
    for left, op, right in zip(values, ops, values[1:], strict=False):
        kind = _kind(left, depth + 1)
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts or len(ops) > 1:
                raise ValueError(f"{ast.unparse(right)!r} after `in` is not a list of values. Write them in brackets, as in [1, 2]")
            others = [_kind(one, depth + 1) for one in right.elts if isinstance(one, ast.Constant)]
            if len(others) < len(right.elts):
                raise ValueError(f"{ast.unparse(right)!r} after `in` has something else than numbers and texts")
        elif type(op) in COMPARISONS:
            others = [_kind(right, depth + 1)]
            if kind == "text" and not isinstance(op, ast.Eq | ast.NotEq):
                raise ValueError(f"texts are compared with == and !=, not as in {ast.unparse(left)!r}")
        else:
            raise ValueError(f"`is` is not accepted; write == or !=. Accepted are {ACCEPTED}")
        if any(other != kind for other in others):
            raise ValueError(f"{ast.unparse(left)!r} is {_named(kind)}, and {ast.unparse(right)!r} is not")


def _named(kind: Kind) -> str:
    return {"number": "a number", "text": "a text", "flag": "true or false"}[kind]


# Evaluated, over whole columns


def _value(node: ast.expr, table: Table) -> Any:
    match node:
        case ast.Name(name):
            return table[name]
        case ast.Constant(bool() as flag):
            return np.bool_(flag)
        case ast.Constant(str() as text):
            return np.bytes_(text.encode("utf-8", "surrogatepass"))
        case ast.Constant(int() | float() as number):
            return np.float64(number)
        case ast.UnaryOp(ast.Not(), operand):
            return ~_true(_value(operand, table))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, table)
        case ast.UnaryOp(_, operand):
            return _value(operand, table)
        case ast.BoolOp(op, values):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            found = [_true(_value(value, table)) for value in values]
            out = found[0]
            for other in found[1:]:
                out = join(out, other)
            return out
        case ast.BinOp(left, op, right):
            return ARITHMETIC[type(op)](_value(left, table), _value(right, table))
        case ast.Compare(left, ops, comparators):
            return _comparison([left, *comparators], ops, table)
        case _:
            raise AssertionError("what was checked is evaluated")


def _comparison(nodes: list[ast.expr], ops: list[ast.cmpop], table: Table) -> Any:
    out: Any = np.bool_(True)
    for left, op, right in zip(nodes, ops, nodes[1:], strict=False):
        value = _value(left, table)
        if isinstance(op, ast.In | ast.NotIn):
            assert isinstance(right, ast.List | ast.Tuple | ast.Set)
            found = np.zeros(np.shape(value), bool)
            for one in right.elts:
                found = found | (value == _value(one, table))
            here = (found if isinstance(op, ast.In) else ~found) & _there(value)
        else:
            other = _value(right, table)
            here = COMPARISONS[type(op)](value, other) & _there(value) & _there(other)
        out = out & here
    return out


def _there(value: Any) -> Any:
    """Where there is a value."""
    return ~np.isnan(value) if np.asarray(value).dtype.kind == "f" else np.bool_(True)


def _true(value: Any) -> Any:
    return value != np.bytes_(b"") if np.asarray(value).dtype.kind == "S" else np.asarray(value, bool)
