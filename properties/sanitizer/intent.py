"""What the caller does with a result, as its source says: the bits alone do not tell it.

Equal tensors are summed by mistake, or for an average, which divides the sum by the number of
ranks. Equal tensors are gathered by mistake, or to check that the replicas agree, which compares
what was gathered. Both show in the function that makes the call; where its source cannot be read,
or does not show it, nothing is assumed.
"""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache

from sim.callsite import Frame

_COUNTS = re.compile(r"world|size|ranks|replicas|procs|\bn\b|\bws\b")
_COMPARISONS = ("equal", "allclose", "isclose", "assert_close", "assert_equal", "assert_allclose")
_SHAPES = re.compile(r"shape|size\(|len\(|numel")


def averages(frame: Frame, size: int) -> bool:
    """Whether the function divides what it sums at this line by the number of ranks, later on.

    Args:
        frame: the call of the sum.
        size: the number of ranks.
    """
    found = _call(frame)
    if found is None:
        return False
    scope, call = found
    summed = _plain(call.args[0])
    for node in ast.walk(scope):
        if getattr(node, "lineno", 0) < frame.line:
            continue
        for value, divisor in _divisions(node):
            if _plain(value) == summed and _counts_ranks(divisor, size):
                return True
    return False


def compares(frame: Frame) -> bool:
    """Whether the function compares what it gathers at this line, later on."""
    found = _call(frame)
    if found is None:
        return False
    scope, call = found
    names = _names(call.args[0])
    later = [node for node in ast.walk(scope) if getattr(node, "lineno", 0) >= frame.line]
    for _ in range(2):
        for node in later:
            names |= _derived(node, names)
    for node in later:
        if isinstance(node, ast.Call) and _last_name(node.func) in _COMPARISONS:
            subject: ast.AST = node
        elif isinstance(node, ast.Assert) and not _SHAPES.search(ast.unparse(node.test)):
            subject = node.test
        else:
            continue
        if names & _names(subject):
            return True
    return False


def _call(frame: Frame) -> tuple[ast.AST, ast.Call] | None:
    """The function around a line, and the only call of a collective in it at that line."""
    tree = _tree(frame.file)
    if tree is None:
        return None
    scope: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            node.lineno <= frame.line <= (node.end_lineno or 0)
        ):
            scope = node
    calls = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Call)
        and node.args
        and node.lineno <= frame.line <= (node.end_lineno or 0)
        and re.match(r"all_reduce|all_gather|reduce", _last_name(node.func))
    ]
    return (scope, calls[0]) if len(calls) == 1 else None


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def _divisions(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """(value, divisor) of what a node divides."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [(node.left, node.right)]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return [(node.target, node.value)]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        return [(node.target, right) for _, right in _divisions(node.value)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr in ("div", "div_", "true_divide", "true_divide_"):
            return [(node.func.value, node.args[0])]
        if node.func.attr in ("mul", "mul_"):
            return [(node.func.value, right) for _, right in _divisions(node.args[0])]
    return []


def _counts_ranks(divisor: ast.expr, size: int) -> bool:
    if isinstance(divisor, ast.Constant):
        return bool(divisor.value == size)
    return _COUNTS.search(ast.unparse(divisor).lower()) is not None


def _plain(value: ast.expr) -> str:
    """An expression as text, without what leaves its elements as they are."""
    return ast.unparse(value).removesuffix(".data").removesuffix(".detach()")


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _derived(node: ast.AST, names: set[str]) -> set[str]:
    """The variables that a node makes of some others: by assignment, or by a loop over them."""
    if isinstance(node, ast.Assign) and names & _names(node.value):
        return set().union(*(_names(target) for target in node.targets))
    if isinstance(node, ast.For) and names & _names(node.iter):
        return _names(node.target)
    comprehensions: list[ast.comprehension] = getattr(node, "generators", [])
    loops = [each for each in comprehensions if names & _names(each.iter)]
    return set().union(*(_names(each.target) for each in loops))
