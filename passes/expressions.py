"""Symbolic sizes as they stand in a snapshot: read without evaluating anything a file says.

    "2*s0 + s1"  --canonical, s0 -> b, s1 -> a-->  "(a+(2*b))"     terms and factors in one order
                 --parse-->                        sympy's 2*s0 + s1

sympy prints terms by the names of the symbols, so a renamed graph spells the same size in another order.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sympy

PLAIN = re.compile(r"[a-zA-Z_]\w*")
SYMBOL = re.compile(r"\b[a-z]+\d+\b")
LONGEST = 10_000
OPERATORS = {
    ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.BitAnd: "&", ast.BitOr: "|", ast.Not: "not ", ast.Invert: "~", ast.And: "and", ast.Or: "or",
}  # fmt: skip
Rename = Callable[[str], str]


@lru_cache(maxsize=65536)
def tree_of(text: str) -> ast.expr:
    """The syntax of an expression. Raises ValueError for what is none."""
    if len(text) > LONGEST:
        raise ValueError(f"a size of {len(text)} characters; allowed: {LONGEST}")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is no size") from error


def canonical(text: str, rename: Rename) -> str:
    """One spelling for an expression whatever its symbols are called, these replaced by ``rename(name)``."""
    return rename(text) if PLAIN.fullmatch(text) else spelled(tree_of(text), rename)


def spelled(node: ast.expr, rename: Rename) -> str:
    """See :func:`canonical`."""
    if isinstance(node, ast.Name):
        return rename(node.id)
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.USub):
        return OPERATORS.get(type(node.op), "+") + spelled(node.operand, rename)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return f"({'+'.join(sorted(terms(node, 1, rename)))})"
    if isinstance(node, ast.UnaryOp) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return product(node, 1, rename)
    if isinstance(node, ast.BinOp):
        symbol = OPERATORS.get(type(node.op), "?")
        return f"({spelled(node.left, rename)}{symbol}{spelled(node.right, rename)})"
    if isinstance(node, ast.Compare):
        parts = [OPERATORS.get(type(o), "?") + spelled(c, rename) for o, c in zip(node.ops, node.comparators)]
        return f"({spelled(node.left, rename)}{''.join(parts)})"
    if isinstance(node, ast.BoolOp):
        return f"({OPERATORS[type(node.op)].join(sorted(spelled(v, rename) for v in node.values))})"
    if isinstance(node, ast.Call):
        given = [spelled(a, rename) for a in node.args]
        name = ast.unparse(node.func)
        return f"{name}({','.join(sorted(given) if name in ('Max', 'Min') else given)})"
    return ast.unparse(node)


def terms(node: ast.expr, sign: int, rename: Rename) -> list[str]:
    """The terms of a sum."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        right = -sign if isinstance(node.op, ast.Sub) else sign
        return terms(node.left, sign, rename) + terms(node.right, right, rename)
    return [product(node, sign, rename)]


def product(node: ast.expr, number: int, rename: Rename) -> str:
    """A product: its number, then its factors in order."""
    factors: list[str] = []
    stack = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult):
            stack += [one.left, one.right]
        elif isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.USub):
            number = -number
            stack.append(one.operand)
        elif isinstance(one, ast.Constant) and type(one.value) is int:
            number *= one.value
        else:
            factors.append(spelled(one, rename))
    if not factors:
        return str(number)
    if number == 1 and len(factors) == 1:
        return factors[0]
    return f"({'*'.join([str(number), *sorted(factors)])})"


def parse(text: int | str) -> sympy.Expr:
    """A size as sympy sees it; unknown functions stay functions. Raises ValueError for what is no size."""
    import sympy

    return sympy.Integer(text) if isinstance(text, int) else built(tree_of(text))


def built(node: ast.expr) -> sympy.Expr:
    """See :func:`parse`."""
    import sympy

    if isinstance(node, ast.Name):
        return sympy.Symbol(node.id, integer=True)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return sympy.sympify(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return -built(node.operand) if isinstance(node.op, ast.USub) else built(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = built(node.left), built(node.right)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case ast.FloorDiv():
                return sympy.floor(left / right)
            case ast.Mod():
                return sympy.Mod(left, right)
            case ast.Pow() if right.is_Integer and abs(int(right)) < 64:
                return left**right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        known = {"Max": sympy.Max, "Min": sympy.Min, "floor": sympy.floor, "ceiling": sympy.ceiling}
        given = [built(a) for a in node.args]
        if node.func.id == "FloorDiv" and len(given) == 2:
            return sympy.floor(given[0] / given[1])
        return known.get(node.func.id, sympy.Function(node.func.id))(*given)
    raise ValueError(f"{ast.unparse(node)!r} is no size")
