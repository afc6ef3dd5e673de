"""`handover`: what prefill and decode must agree on for the KV cache to get from one to the other.

vLLM's NIXL connector refuses a peer whose cache has another dtype (it is part of the connectors'
compatibility hash), and a prefill worker can only hand over through a connector that decode has.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankfold.recipe.finding import Finding
from rankfold.recipe.flags import flag
from rankfold.recipe.rules.engine_flags import connectors
from rankfold.recipe.view import Recipe, Side

RULE = "handover"

WRAPPERS = frozenset(["MultiConnector"])
"""Connectors that only hold others."""


def check(recipe: Recipe) -> Iterator[Finding]:
    """Findings about the two sides of a disaggregated recipe."""
    prefill, decode = recipe.side("prefill"), recipe.side("decode")
    if prefill is None or decode is None or not prefill.flags or not decode.flags:
        return
    ours, theirs = (flag(side.flags, "kv-cache-dtype") for side in (prefill, decode))
    if _family(ours) != _family(theirs):
        side = decode if theirs is not None else prefill
        yield recipe.source.finding(
            RULE,
            _at(side, "kv-cache-dtype"),
            f"kv-cache-dtype is {ours or 'not set'} for prefill and {theirs or 'not set'} for "
            "decode, which cannot hand over to each other",
            f"write kv-cache-dtype: {ours or theirs} on both sides",
        )
    yield from _one_side_only(recipe, prefill, decode)
    out, into = (connectors(side) - WRAPPERS for side in (prefill, decode))
    if out and into and not out & into:
        yield recipe.source.finding(
            RULE,
            _at(decode, "kv-transfer-config"),
            f"prefill hands over by {', '.join(sorted(out))}, and decode has "
            f"{', '.join(sorted(into))}",
            "name the same kv_connector on both sides",
        )


def _one_side_only(recipe: Recipe, prefill: Side, decode: Side) -> Iterator[Finding]:
    """A transfer that only one side has. srt-slurm sets it on both, unless connector is null."""
    backend = recipe.source.get(("backend",))
    if not isinstance(backend, dict) or backend.get("connector", "nixl") is not None:
        return
    with_it = [s for s in (prefill, decode) if flag(s.flags, "kv-transfer-config") is not None]
    if len(with_it) == 1:
        without = decode if with_it[0] is prefill else prefill
        yield recipe.source.finding(
            RULE,
            recipe.source.keys[without.flags_at],
            f"{without.name} has no kv-transfer-config, and {with_it[0].name} has one",
            "write it on both sides, or set backend.connector",
        )


def _family(dtype: object) -> str:
    """Names of one dtype are one: `fp8` is fp8_e4m3, and not set is auto."""
    text = str(dtype or "auto").lower()
    return {"fp8_e4m3": "fp8"}.get(text, text)


def _at(side: Side, name: str) -> tuple[str | int, ...]:
    spelling = name if name in side.flags else name.replace("-", "_")
    return (*side.flags_at, spelling)
