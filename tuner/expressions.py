"""The language of `constraints:`, such as `max-num-seqs <= max-num-batched-tokens`.

Numbers, names, quoted strings, true/false, `+ - * / // %`, comparisons (chained ones too),
and/or/not, parentheses. A tokenizer replaces the names, which may hold hyphens and dots, by
placeholders; Python's own parser reads the rest; a whitelist of nodes is walked. Nothing is
ever evaluated by Python itself, and the size and depth of the text are bounded.

Truth has three values. A parameter that is left at vLLM's default has no value that the tuner
knows, and a word such as `auto` has no number: a comparison with one of them is *unknown*,
which carries through arithmetic, `not`, `and` and `or` as in Kleene's logic. A constraint that
comes out unknown is taken as holding, because vLLM checks its own limits and a start that it
refuses is a result, while a point held back wrongly would never be seen. One that divides by
zero or overflows is violated: it promises nothing at that point.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from tuner.expression_syntax import ExpressionError, read
from tuner.types import JsonValue

__all__ = ["Expression", "ExpressionError", "parse"]


class _Unknown(Enum):
    UNKNOWN = "unknown"


_UNKNOWN: Final = _Unknown.UNKNOWN
_Value: TypeAlias = JsonValue | _Unknown
_Truth: TypeAlias = bool | _Unknown

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked constraint.

    Attributes:
        text: as it was written.
        names: canonical names that it reads.
    """

    text: str
    names: frozenset[str]
    _tree: ast.expr = field(repr=False, compare=False)
    _placeholders: Mapping[str, str] = field(repr=False, compare=False)

    def holds(self, values: Mapping[str, JsonValue]) -> bool:
        """Whether it is true, or unknown, where the names have `values`.

        A name that is missing or None is at vLLM's default and has no known value.
        """
        bound = {short: values.get(name) for short, name in self._placeholders.items()}
        try:
            return _truth(_evaluate(self._tree, bound)) is not False
        except ArithmeticError:
            return False


def parse(text: str, known: Collection[str]) -> Expression:
    """Read `text`, in which the canonical names `known` may stand.

    Raises:
        ExpressionError: not an expression, too long or deep, or a name that is not known.
    """
    tree, placeholders = read(text, known)
    return Expression(text, frozenset(placeholders.values()), tree, placeholders)


def _evaluate(node: ast.expr, bound: Mapping[str, JsonValue]) -> _Value:
    """The value of a checked tree; ArithmeticError where it has none."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=short):
            named = bound[short]
            return _UNKNOWN if named is None else named
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            truth = _truth(_evaluate(operand, bound))
            return truth if isinstance(truth, _Unknown) else not truth
        case ast.UnaryOp(op=sign, operand=operand):
            number = _evaluate(operand, bound)
            if not isinstance(number, int | float):
                return _UNKNOWN
            return -number if isinstance(sign, ast.USub) else +number
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _evaluate(left, bound), _evaluate(right, bound)
            if not (isinstance(first, int | float) and isinstance(second, int | float)):
                return _UNKNOWN
            return _ARITHMETIC[type(op)](first, second)
        case ast.BoolOp(op=op, values=values):
            return _combine(isinstance(op, ast.And), values, bound)
        case ast.Compare():
            return _compare_chain(node, bound)
    raise AssertionError(f"not part of the language: {ast.dump(node)}")  # pragma: no cover


def _combine(is_and: bool, nodes: list[ast.expr], bound: Mapping[str, JsonValue]) -> _Truth:
    """Kleene's and/or, left to right, stopping where the result is decided."""
    result: _Truth = is_and
    for node in nodes:
        truth = _truth(_evaluate(node, bound))
        if isinstance(truth, _Unknown):
            result = _UNKNOWN
        elif truth is not is_and:
            return truth
    return result


def _compare_chain(node: ast.Compare, bound: Mapping[str, JsonValue]) -> _Truth:
    """`a < b < c` is `a < b and b < c`."""
    result: _Truth = True
    left = _evaluate(node.left, bound)
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(comparator, bound)
        truth = _compare(op, left, right)
        if truth is False:
            return False
        if truth is not True:
            result = _UNKNOWN
        left = right
    return result


def _compare(op: ast.cmpop, left: _Value, right: _Value) -> _Truth:
    if isinstance(left, _Unknown) or isinstance(right, _Unknown):
        return _UNKNOWN
    if isinstance(op, ast.Eq | ast.NotEq):
        return (left == right) is isinstance(op, ast.Eq)
    if isinstance(left, int | float) and isinstance(right, int | float):
        return _ORDER[type(op)](left, right)
    return _UNKNOWN


def _truth(value: _Value) -> _Truth:
    """Numbers and booleans as Python has them; words, lists and mappings are unknown."""
    return bool(value) if isinstance(value, bool | int | float) else _UNKNOWN
