"""Reading the constraint language: a text becomes a checked tree of `ast` nodes.

The language and what it means are told in `tuner.expressions`, which is where callers go.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tuner.names import canonical, did_you_mean
from tuner.units import parse_quantity

MAX_LENGTH = 1000
"""Characters of one expression."""

MAX_DEPTH = 40
"""Nesting of one expression; far below Python's recursion limit."""

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<name>[A-Za-z_][A-Za-z0-9_]*(?:[-.][A-Za-z0-9_]+)*)
  | (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?P<unit>[A-Za-z_]\w*)?
  | (?P<string>'[^'\\]*'|"[^"\\]*")
  | (?P<operator><=|>=|==|!=|//|<(?!>)|>|\+|-|\*(?!\*)|/|%|\(|\))
  | (?P<end>\Z)
  | (?P<other>.)
    )""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_NUMBER_AFTER_NAME = re.compile(r"-\d+(?:\.\d+)?")
_INSTEAD = {
    "=": "Write `==`, `<=` or `>=` to compare.",
    "!": "Write `not` or `!=`.",
    "&": "Write `and`.",
    "|": "Write `or`.",
    "*": "Powers are not part of the language; write the product.",
    "^": "Powers are not part of the language; write the product.",
    "<": "Write `!=`.",
    "'": "Close the quote; backslashes are not allowed in it.",
    '"': "Close the quote; backslashes are not allowed in it.",
    ",": "Lists and calls are not part of the language; write `x == 1 or x == 2`.",
}


class ExpressionError(ValueError):
    """A text that is not an expression over the known names.

    Args:
        message: what is wrong.
        hint: what to write instead; may be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


_NODES = (
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.BinOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
    *(ast.Name, ast.Load, ast.Constant),
)


def read(text: str, known: Collection[str]) -> tuple[ast.expr, dict[str, str]]:
    """A checked tree, and which canonical name each of its placeholders stands for.

    Raises:
        ExpressionError: not an expression, too long or deep, or a name that is not known.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression may have {MAX_LENGTH} characters, not {len(text)}")
    names: dict[str, str] = {}
    tokens = list(_tokens(text, frozenset(known), names))
    _check_parentheses(tokens)
    source = " ".join(token.python for token in tokens)
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _syntax_error(tokens, error) from None
    _check_tree(tree)
    if not names:
        raise ExpressionError(
            "it names no parameter", "Compare parameters, such as `max-num-seqs <= 256`."
        )
    return tree, {short: name for name, short in names.items()}


@dataclass(frozen=True, slots=True)
class _Token:
    """A word of the expression, as written and as Python's parser is given it."""

    written: str
    python: str
    operand: bool = False


def _tokens(text: str, known: frozenset[str], names: dict[str, str]) -> Iterator[_Token]:
    """Cut `text` into tokens; `names` collects canonical name -> placeholder."""
    position = 0
    previous_operand = False
    while (match := _TOKEN.match(text, position)) is not None and match["end"] is None:
        position = match.end()
        if match["name"] is not None:
            token, unread = _name_token(match["name"], known, names)
            position -= unread
        elif match["number"] is not None:
            token = _number_token(match["number"], match["unit"] or "")
        elif match["string"] is not None:
            written = match["string"]
            token = _Token(written, ascii(written[1:-1]), operand=True)
        elif match["operator"] is not None:
            token = _Token(match["operator"], match["operator"])
        else:
            raise _unexpected(match["other"])
        if token.operand and previous_operand:
            raise ExpressionError(
                f"`{token.written}` follows a value without an operator",
                "Put an operator such as `<=` or `and` between them.",
            )
        previous_operand = token.operand
        yield token


def _name_token(written: str, known: frozenset[str], names: dict[str, str]) -> tuple[_Token, int]:
    """The token at the start of `written`, and how many of its characters are left unread."""
    if written in ("and", "or", "not"):
        return _Token(written, written), 0
    name = canonical(written)
    if name in known:
        return _placeholder(written, name, names), 0
    if written.lower() in ("true", "false"):
        return _Token(written, written.capitalize(), operand=True), 0
    # A hyphen may be a minus: `max-num-seqs-1` is a known name and then a number.
    for cut in (i for i in range(len(written) - 1, 0, -1) if written[i] == "-"):
        head = canonical(written[:cut])
        if head not in known:
            continue
        rest = written[cut:]
        if _NUMBER_AFTER_NAME.fullmatch(rest):
            return _placeholder(written[:cut], head, names), len(rest)
        raise ExpressionError(
            f"`{written}` is not a known name",
            f"If a difference is meant, put spaces around the minus: "
            f"`{written[:cut]} - {rest[1:]}`.",
        )
    raise ExpressionError(f"unknown name `{written}`", _unknown_hint(name, known))


def _unknown_hint(name: str, known: frozenset[str]) -> str:
    if name.lower() in ("and", "or", "not"):
        return f"Write `{name.lower()}`."
    if guess := did_you_mean(name, known):
        return guess
    listed = ", ".join(sorted(known)[:12]) or "none"
    return (
        f"Search it under `search_space:` or fix it under `server.args:`, or quote it if it is a "
        f"word to compare with. Known names: {listed}."
    )


def _placeholder(written: str, name: str, names: dict[str, str]) -> _Token:
    return _Token(written, names.setdefault(name, f"_{len(names)}"), operand=True)


def _number_token(number: str, unit: str) -> _Token:
    if unit:
        quantity = parse_quantity(number + unit)
        hint = "Put an operator between them."
        if quantity is not None:
            hint = f"Write the number: {float(quantity):.15g}."
        raise ExpressionError(f"units such as in `{number}{unit}` are not understood here", hint)
    if number.isdecimal():
        return _Token(number, str(int(number)), operand=True)
    value = float(number)
    if value == float("inf"):
        raise ExpressionError(f"`{number}` is too large")
    return _Token(number, repr(value), operand=True)


def _unexpected(character: str) -> ExpressionError:
    shown = character if character.isprintable() else ascii(character)
    return ExpressionError(f"unexpected `{shown}`", _INSTEAD.get(character, ""))


def _check_parentheses(tokens: list[_Token]) -> None:
    depth = 0
    for token in tokens:
        depth += {"(": 1, ")": -1}.get(token.written, 0)
        if depth < 0:
            raise ExpressionError("a `)` has no `(` before it")
        if depth > MAX_DEPTH:
            raise _too_deep()
    if depth:
        raise ExpressionError("a `(` is never closed")


def _too_deep() -> ExpressionError:
    return ExpressionError(
        f"more than {MAX_DEPTH} levels deep", "Split it into several constraints."
    )


def _syntax_error(tokens: list[_Token], error: Exception) -> ExpressionError:
    """Name the token where Python's parser gave up."""
    if not tokens:
        return ExpressionError("the constraint is empty", "Delete it or write a comparison.")
    if not isinstance(error, SyntaxError):
        return _too_deep()
    if not tokens[-1].operand and tokens[-1].written != ")":
        return ExpressionError(
            f"ends too early, after `{tokens[-1].written}`", "Something is missing there."
        )
    column = (error.offset or 1) - 1
    end = 0
    for token in tokens:
        end += len(token.python) + 1
        if column < end:
            return ExpressionError(
                f"cannot be read from `{token.written}` on",
                "A constraint is a comparison such as `max-num-seqs <= 256`.",
            )
    return ExpressionError("cannot be read", "Write a comparison such as `max-num-seqs <= 256`.")


# --- checking ----------------------------------------------------------------------------


def _check_tree(tree: ast.expr) -> None:
    """Refuse nodes, depths and uses of strings and numbers outside the language."""
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            break
    else:
        raise _too_deep()
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise ExpressionError(
                "only numbers, names, arithmetic, comparisons, and/or/not and parentheses "
                "are understood"
            )
        if isinstance(node, ast.Compare):
            _check_strings(node)
        elif isinstance(node, ast.BinOp):
            _refuse_strings(node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            _check_conditions(node.values)
        elif isinstance(node, ast.UnaryOp):
            _refuse_strings(node.operand)
            if isinstance(node.op, ast.Not):
                _check_conditions([node.operand])
    _check_conditions([tree])


def _check_strings(node: ast.Compare) -> None:
    operands = [node.left, *node.comparators]
    for index, comparison in enumerate(node.ops):
        if not isinstance(comparison, ast.Eq | ast.NotEq):
            _refuse_strings(operands[index], operands[index + 1])


def _refuse_strings(*operands: ast.expr) -> None:
    for node in operands:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            raise ExpressionError(
                f"the text '{node.value}' can only be compared with == and !=",
                "Numbers and names stand without quotes.",
            )


def _check_conditions(nodes: list[ast.expr]) -> None:
    """A condition is a comparison, and/or/not of conditions, true/false, or a lone name."""
    for node in nodes:
        arithmetic = isinstance(node, ast.BinOp) or (
            isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not)
        )
        value = isinstance(node, ast.Constant) and not isinstance(node.value, bool)
        if arithmetic or value:
            raise ExpressionError(
                "a condition must be true or false, and this is a value",
                "Compare it with something, such as `... <= 256`.",
            )
