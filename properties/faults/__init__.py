"""Known bugs that can be switched on: what the checks have to catch.

| file | what it is |
|---|---|
| fault.py | `Fault`: its name, mechanism, public report, where it shows, how it is switched on |
| program.py, judged.py, programs/ | small SPMD programs for code that MiniMax-M3 has not |
| controls.py | programs that were taken for wrong, and are right |
| patches.py | how functions of the running code are replaced, and put back |
| the others | the faults, by what goes wrong; see `CLASSES` |
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from properties.faults import (
    attention_dp,
    aux,
    aux_shards,
    boundary,
    counted,
    counted_outside_moe,
    deferred,
    deployment,
    deployment_experts,
    final_gather,
    groups,
    handover,
    layout,
    missing,
    operands,
    overlay,
    padding,
    receive,
    rounding,
    sparse,
    storage,
    transport,
    untapped,
    weights,
)
from properties.faults.fault import Fault, UnknownFault

CLASSES: Mapping[str, str] = {
    "A": "counted too often",
    "B": "reduction missing or misplaced",
    "C": "layout of streams sharded by token",
    "D": "stage boundary",
    "E": "aux hidden states over stages",
    "F": "padding, uneven and empty batches",
    "G": "groups, sizes and order",
    "H": "aliasing",
    "I": "wrong operand or parameter",
    "J": "KV caches and chosen blocks",
    "K": "hand-over of KV caches",
}
"""The catalogue's classes of fault, by letter."""

_OF_MODULE = {
    "A": (counted, counted_outside_moe, untapped),
    "B": (missing, deferred),
    "C": (layout, final_gather),
    "D": (boundary, receive, transport, overlay, rounding),
    "E": (aux, aux_shards),
    "F": (padding,),
    "G": (groups, attention_dp, deployment, deployment_experts),
    "H": (storage,),
    "I": (weights, operands),
    "J": (sparse,),
    "K": (handover,),
}
_OF_NAME = {
    "dp-experts-reduced-before-scatter": "A",
    "dp-shared-of-the-dense-group": "A",
    "dp-scatter-does-not-reduce": "B",
    "dp-scatter-mended-alone": "B",
    "dp-shared-left-partial": "B",
    "dp-sum-over-other-tokens": "C",
    "dp-shared-on-dispatched-rows": "I",
    "dep-sums-before-the-scatter": "A",
    "dep-shared-of-the-dense-group": "A",
    "dep-scatter-does-not-reduce": "B",
    "dep-shared-left-partial": "B",
    "dep-last-sum-over-other-tokens": "C",
    "dep-one-scale-for-all-rows": "F",
    "dep-gather-pads-with-garbage": "F",
    "dep-shared-on-dispatched-rows": "I",
    "dense-mlp-all-reduces": "A",
    "untapped-copy-reduced": "B",
    "untapped-whole-gathered": "C",
    "ranks-sum-in-their-own-order": "G",
    "one-scale-for-the-batch": "F",
    "sp-at-one-stage-only": "C",
    "exit-leaves-aux-sharded": "E",
    "aux-local-first": "E",
    "send-buffer-reused": "H",
    "slices-gathered-over-pp": "G",
    "broadcast-from-the-wrong-rank": "G",
    "rank-skips-the-barrier": "G",
    "logits-gathered-in-reverse": "C",
    "logits-left-sharded": "C",
}
"""Faults of another class than most of their file's."""

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for modules in _OF_MODULE.values()
    for module in modules
    for fault in module.FAULTS
}
"""Every fault by its name."""
_LETTERS = {
    fault.name: letter
    for letter, modules in _OF_MODULE.items()
    for module in modules
    for fault in module.FAULTS
} | _OF_NAME


def letter(fault: Fault) -> str:
    """The fault's class in the catalogue, a letter of `CLASSES`."""
    return _LETTERS[fault.name]


def find(name: str) -> Fault:
    """The fault of this name.

    Raises:
        UnknownFault: there is none.
    """
    if name in FAULTS:
        return FAULTS[name]
    near = difflib.get_close_matches(name, FAULTS, n=3, cutoff=0.4)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise UnknownFault(f"no fault is called {name!r}{hint} (rankfold faults --list shows all)")


__all__ = ["CLASSES", "FAULTS", "Fault", "UnknownFault", "find", "letter"]
