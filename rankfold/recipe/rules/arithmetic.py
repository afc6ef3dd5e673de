"""`nodes`: workers x GPUs a worker against nodes x GPUs a node.

The packing is that of srt-slurm's `allocate_endpoints`: a worker of a node's GPUs or more takes
whole nodes, smaller ones share a node as long as they fit. A side of 0 nodes, or a backend that
allows it, shares nodes with the other side; then only sums are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankfold.recipe.finding import Finding
from rankfold.recipe.view import Recipe, Side

RULE = "nodes"

MOST_GPUS_PER_NODE = {"gb200": 4, "gb300": 4, "b200": 8, "b300": 8, "h100": 8, "h200": 8, "h20": 8}
"""GPUs that one node of a kind has at most: trays of an NVL72 have 4."""


def check(recipe: Recipe) -> Iterator[Finding]:
    """Findings about nodes."""
    yield from _node_size(recipe)
    sides = [side for side in recipe.sides if side.nodes is not None]
    for side in recipe.sides:
        there = (side.nodes or 0) * recipe.gpus_per_node
        if not side.gpus_written and there % side.workers:
            yield recipe.source.finding(
                RULE,
                ("resources", f"{side.name}_workers"),
                f"{side.name}: {_gpus(there)} do not divide by {_workers(side)}",
                f"write gpus_per_{side.name}",
            )
    if _shares(recipe):
        yield from _shared(recipe, sides)
        return
    for side in sides:
        yield from _own(recipe, side)


def nodes_needed(recipe: Recipe, side: Side) -> int:
    """Nodes that the workers of a side take."""
    per_node = recipe.gpus_per_node
    if side.gpus >= per_node or recipe.resources.spread_workers:
        return side.workers * -(-side.gpus // per_node)
    return -(-side.workers // (per_node // side.gpus))


def _shares(recipe: Recipe) -> bool:
    backend = recipe.model.backend
    allowed = backend is not None and backend.allow_prefill_decode_colocation
    return bool(allowed) or any(side.nodes == 0 for side in recipe.sides)


def _own(recipe: Recipe, side: Side) -> Iterator[Finding]:
    needed, nodes = nodes_needed(recipe, side), side.nodes or 0
    if needed == nodes:
        return
    what = (
        f"{side.name}: {_workers(side)} of {_gpus(side.gpus)} need{'s' * (side.workers == 1)} "
        f"{_nodes(needed)} of {_gpus(recipe.gpus_per_node)}, and {side.name}_nodes is {nodes}"
    )
    if needed < nodes:
        idle = nodes - needed
        what += f": {_nodes(idle)} stay{'s' * (idle == 1)} idle"
    yield recipe.source.finding(
        RULE,
        ("resources", f"{side.name}_nodes"),
        what,
        f"write {side.name}_nodes: {needed}, or change {side.name}_workers or gpus_per_{side.name}",
    )


def _shared(recipe: Recipe, sides: list[Side]) -> Iterator[Finding]:
    per_node = recipe.gpus_per_node
    needed = sum(side.workers * side.gpus for side in sides)
    nodes = sum(side.nodes or 0 for side in sides)
    apart = sum(nodes_needed(recipe, side) for side in sides)
    if needed <= nodes * per_node and nodes <= apart:
        return
    fewest = -(-needed // per_node)
    what = f"{_gpus(needed)} are needed on shared nodes, and {_nodes(nodes)} have "
    what += f"{nodes * per_node}"
    if nodes > apart:
        what += f": {_nodes(apart)} are enough even without sharing"
        fewest = apart
    key = next((side.name for side in sides if side.nodes), "prefill")
    yield recipe.source.finding(
        RULE, ("resources", f"{key}_nodes"), what, f"write nodes that add up to {fewest}"
    )


def _node_size(recipe: Recipe) -> Iterator[Finding]:
    kind = (recipe.resources.gpu_type or "").lower()
    most = MOST_GPUS_PER_NODE.get(kind)
    if most is not None and recipe.gpus_per_node > most:
        yield recipe.source.finding(
            RULE,
            ("resources", "gpus_per_node"),
            f"a node of {kind} has {most} GPUs at most, and gpus_per_node is "
            f"{recipe.gpus_per_node}",
            f"write gpus_per_node: {most}",
        )


def _workers(side: Side) -> str:
    return f"{side.workers} worker{'s' * (side.workers != 1)}"


def _gpus(n: int) -> str:
    return f"{n} GPU{'s' * (n != 1)}"


def _nodes(n: int) -> str:
    return f"{n} node{'s' * (n != 1)}"
