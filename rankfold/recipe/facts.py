"""What descriptions may refer to, and whether their claims hold.

A claim holds if anything that it may refer to has its value: "2 nodes" of a side may be all its
nodes or those of one worker. What is not known cannot make a claim wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rankfold.recipe.descriptor import Claim
from rankfold.recipe.master import Point
from rankfold.recipe.view import Recipe
from rankfold.recipe.words import Degrees


@dataclass(frozen=True, kw_only=True)
class SideFacts:
    """What is true of one side; None where it is not known."""

    workers: int
    gpus: int | None
    nodes: int | None
    degrees: Degrees | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a description may refer to."""

    sides: dict[str, SideFacts]
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    concurrencies: tuple[int, ...] = ()


def facts_of_point(point: Point, recipe: Recipe | None) -> Facts:
    """What is true of a point: its own words, and the nodes of its recipe."""
    sides = {}
    for name, side in point.sides.items():
        there = recipe.side(name) if recipe else None
        sides[name] = SideFacts(
            workers=side.workers,
            gpus=there.gpus if there else side.degrees.gpus if side.degrees else None,
            nodes=there.nodes if there else None,
            degrees=side.degrees,
        )
    return Facts(
        sides=sides,
        gpus_per_node=recipe.gpus_per_node if recipe else None,
        gpu_type=(recipe.resources.gpu_type or "").lower() if recipe else None,
        concurrencies=point.concurrencies,
    )


def facts_of(recipe: Recipe) -> Facts:
    """What is true of a recipe."""
    return Facts(
        sides={
            side.name: SideFacts(
                workers=side.workers, gpus=side.gpus, nodes=side.nodes, degrees=side.settled
            )
            for side in recipe.sides
        },
        gpus_per_node=recipe.gpus_per_node,
        gpu_type=(recipe.resources.gpu_type or "").lower(),
        concurrencies=recipe.concurrencies,
    )


def _candidates(claim: Claim, facts: Facts) -> list[SideFacts]:
    if claim.side is None:
        return list(facts.sides.values())
    side = facts.sides.get(claim.side)
    return [side] if side else []


def holds(claim: Claim, facts: Facts) -> bool:
    """Whether a claim is right, or cannot be judged."""
    if claim.kind == "conc":
        return not facts.concurrencies or claim.value in facts.concurrencies
    if claim.kind == "gpus_per_node":
        return facts.gpus_per_node in (None, claim.value)
    if claim.kind == "nodes_total":
        return _total_nodes(facts) is None or claim.value in _totals(facts)
    sides = _candidates(claim, facts)
    if not sides:
        return False
    known = [_values(claim, side, facts) for side in sides]
    if any(values is None for values in known):
        return True
    if claim.side is None and claim.kind in ("nodes", "gpus"):
        known.append(_whole(claim.kind, facts))
    return any(claim.value in values for values in known if values)


def _values(claim: Claim, side: SideFacts, facts: Facts) -> set[int] | None:
    """The values that a claim may have about a side; None if that is not known."""
    per_node = facts.gpus_per_node
    if claim.kind == "workers":
        return {side.workers}
    if claim.kind == "degree":
        return None if side.degrees is None else _degree(claim.axis, side.degrees)
    if side.gpus is None:
        return None
    if claim.kind == "gpus_per_worker":
        return {side.gpus}
    if claim.kind == "gpus_each":  # Each worker, or each node.
        return {side.gpus, per_node or side.gpus}
    if per_node is None or side.nodes is None:
        return None
    if claim.kind == "nodes_per_worker":
        return {-(-side.gpus // per_node)}
    if claim.kind == "nodes":
        return {side.nodes, -(-side.gpus // per_node)}
    return {side.gpus, side.workers * side.gpus, side.nodes * per_node}


def _degree(axis: str, degrees: Degrees) -> set[int]:
    if axis == "ep":
        return {degrees.tp * degrees.dp} if degrees.ep else {1}
    if axis == "dep":
        return {degrees.dp} if degrees.ep and degrees.tp == 1 else set()
    if axis == "tep":
        return {degrees.tp} if degrees.ep and degrees.dp == 1 else set()
    return {int(getattr(degrees, axis))}


def _total_nodes(facts: Facts) -> int | None:
    nodes = [side.nodes for side in facts.sides.values()]
    return None if None in nodes else sum(n for n in nodes if n is not None)


def _totals(facts: Facts) -> set[int]:
    """All nodes, without and with one for the head and its services."""
    total = _total_nodes(facts) or 0
    return {total, total + 1}


def _whole(kind: str, facts: Facts) -> set[int]:
    if kind == "nodes":
        return _totals(facts)
    per_node, total = facts.gpus_per_node or 0, _total_nodes(facts) or 0
    return {total * per_node, sum(s.workers * (s.gpus or 0) for s in facts.sides.values())}


def listed(parts: Iterable[tuple[str | None, str]]) -> str:
    """`decode 2 workers, DEP8`: each side's parts after its name, without repetition."""
    by_side: dict[str | None, dict[str, None]] = {}
    for side, part in parts:
        if part:
            by_side.setdefault(side, {})[part] = None
    return "; ".join(
        " ".join(filter(None, (side, ", ".join(found)))) for side, found in by_side.items()
    )


def said(claim: Claim) -> str:
    """What a claim says, without its side."""
    if claim.kind == "degree":
        return f"{claim.axis.upper()}{claim.value}"
    if claim.kind == "conc":
        return f"concurrency {claim.value}"
    return _counted(claim.kind, claim.value)


def true_instead(claim: Claim, facts: Facts) -> str:
    """What is true in place of a wrong claim, without its side; empty if that is not one thing."""
    right = _right(claim, facts)
    if claim.kind == "degree" and right is None:
        words = [f"{n} {s.degrees.word.upper()}" for n, s in facts.sides.items() if s.degrees]
        return " and ".join(words)
    if claim.kind == "conc":
        return f"concurrency {'x'.join(map(str, facts.concurrencies))}"
    if isinstance(right, int):
        if claim.kind == "degree":
            return f"{claim.axis.upper()}{right}"
        return _counted(claim.kind, right)
    return right or ""


def _counted(kind: str, value: int) -> str:
    one, many = _UNITS[kind]
    return f"{value} {one if value == 1 else many}"


_UNITS = {
    "workers": ("worker", "workers"),
    "gpus": ("GPU", "GPUs"),
    "gpus_each": ("GPU each", "GPUs each"),
    "gpus_per_worker": ("GPU a worker", "GPUs a worker"),
    "gpus_per_node": ("GPU a node", "GPUs a node"),
    "nodes": ("node", "nodes"),
    "nodes_per_worker": ("node a worker", "nodes a worker"),
    "nodes_total": ("node in all", "nodes in all"),
}


def _right(claim: Claim, facts: Facts) -> int | str | None:
    """What stands in the place of a wrong claim; None if several things may."""
    if claim.kind == "gpus_per_node":
        return facts.gpus_per_node
    if claim.kind == "nodes_total":
        return _total_nodes(facts)
    if claim.kind == "conc":
        return facts.concurrencies[0] if len(facts.concurrencies) == 1 else None
    sides = _candidates(claim, facts)
    if len(sides) != 1:
        return None
    (side,) = sides
    if claim.kind == "degree" and side.degrees:
        if claim.axis in ("dep", "tep"):
            return side.degrees.word.upper()
        return next(iter(_degree(claim.axis, side.degrees)))
    if claim.kind == "nodes":
        return side.nodes
    if claim.kind in ("gpus", "gpus_each"):
        return side.gpus
    values = _values(claim, side, facts)
    return next(iter(values)) if values else None


def corrected(sentence: str, wrong: list[Claim], facts: Facts) -> str:
    """The sentence with every wrong claim put right, or a request where that is not clear."""
    text = sentence
    for claim in sorted(wrong, key=lambda claim: -claim.start):
        right = _right(claim, facts)
        if right is None:
            return "write what the configuration has, or remove the comment"
        start = claim.start
        if claim.kind == "degree" and claim.axis in ("dep", "tep"):
            start = text.lower().rindex(claim.axis, 0, claim.start)
            right = str(right).lower() if text[start].islower() else right
        text = f"{text[:start]}{right}{text[claim.end :]}"
    return f"# {' '.join(text.split())}"
