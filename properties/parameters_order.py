"""What is inside one parameter is in the order that its consumer reads it in."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from model.provenance import Numbering

_PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13_weight": ("w1", "w3"),
    "w2_weight": ("w2",),
}
"""The parts of a packed parameter, in order, by the names of both."""
_INDEXER = ("index_q_proj", "index_k_proj")
"""What a layer with sparse attention has in its qkv_proj as well."""


def order_fault(
    name: str, numbers: torch.Tensor, slots: Sequence[int] | None, numbering: Numbering
) -> tuple[str, str] | None:
    """What is wrong inside a parameter, and why; None if nothing is.

    Args:
        name: the parameter's.
        numbers: int64, what it was loaded from, in plain order; zero for padding.
        slots: for routed experts, the expert that belongs in each slot.
        numbering: of the checkpoint.
    """
    tensors = list(numbering.first)
    firsts = torch.tensor(list(numbering.first.values()))
    packed = next((parts for leaf, parts in _PACKED.items() if leaf in name), None)
    for slot, inside in enumerate(numbers if slots is not None else [numbers]):
        rows = inside.reshape(-1, inside.shape[-1])
        heads = rows[:, 0]
        # Elements of a row follow each other, so its first one speaks for it; padding is zero.
        if not bool((rows.diff(dim=1) == (heads > 0).unsqueeze(1)).all()):
            return "has a row in the wrong order", "elements of a row do not follow each other"
        heads = heads[heads > 0]
        owners = torch.searchsorted(firsts, heads, right=True) - 1
        new = torch.ones_like(owners, dtype=torch.bool)
        new[1:] = owners.diff() != 0
        runs = [tensors[i] for i in owners[new].tolist()]
        strange = next((t for t in runs if _layer(t) != _layer(name)), None)
        if strange is not None:
            return "holds another layer's weights", f"it has elements of {strange}"
        if slots is not None:
            expert = slots[slot]
            wrong = next((t for t in runs if f".experts.{expert}." not in t), None)
            if wrong is not None:
                why = f"slot {slot} is expert {expert}'s, and has {wrong}"
                return "has an expert in the wrong slot", why
        parts = [_part(t) for t in runs]
        if packed and any(part in _INDEXER for part in parts):
            packed = tuple(dict.fromkeys((*packed, *_INDEXER)))
        # What a parameter of several parts is made of is known for those in the table only.
        wanted = list(packed) if packed else [_part(name)] if len(parts) == 1 else parts
        if parts and parts != wanted:
            why = f"has {', '.join(parts)} where {', '.join(wanted)} belongs"
            return "has its parts in the wrong order" if packed else "has other weights", why
        if not bool((new[1:] | (heads.diff() > 0)).all()):
            return "has rows in the wrong order", "rows of one tensor do not follow each other"
    return None


def _part(name: str) -> str:
    """ "q_proj" of "...self_attn.q_proj.weight"; the last word where that is the part's own."""
    *_, part, kind = name.split(".")
    return part if kind.startswith("weight") else kind


def _layer(name: str) -> str:
    found = re.search(r"layers\.(\d+)\.", name)
    return found.group(1) if found else ""
