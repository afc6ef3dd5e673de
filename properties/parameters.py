"""Every element of the checkpoint is loaded once, into the rank and the slot that the layout says.

`model.provenance` finds out which element of the checkpoint is where; here that is compared with
what tensor, expert and pipeline parallelism ask for, worked out from the checkpoint's names and
shapes alone:

| part of the checkpoint | on the ranks of its stage |
|---|---|
| norms, index key projection, router and its bias, shared experts beside MegaMoE | whole |
| query, gate and up projections | rank i has the i-th slice of the rows |
| key, value and index query projections | likewise, by heads; fewer than ranks are repeated |
| output and down projections | rank i has the i-th slice of the columns |
| embedding and head | the i-th slice of the rows of the padded vocabulary |
| routed experts under EP | whole on one rank of the EP group |
| routed experts without EP | the i-th slice of each on rank i |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from model.provenance import NO_ELEMENT, UNWRITTEN, Loaded, Numbering
from properties.parameters_order import order_fault
from properties.verdict import Verdict
from sim import Topology

_NAME = "parameters"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_BY_ROWS = (".q_proj.", ".gate_proj.", ".up_proj.", ".w1.", ".w3.")
_BY_COLUMNS = (".o_proj.", ".down_proj.", ".w2.")
_BY_KV_HEADS = (".k_proj.", ".v_proj.", ".index_q_proj.")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What of the model decides where its parameters belong."""

    topology: Topology
    kv_heads: int
    """Key and value heads of the whole model."""
    whole_shared_experts: bool
    """Whether every rank has the shared experts whole, as beside MegaMoE."""
    vocabulary_multiple: int = 64
    """The vocabulary is padded to a multiple of this before it is cut (vLLM's default)."""

    def expected(self, name: str, numbers: torch.Tensor, rank: int) -> torch.Tensor | None:
        """The part of a checkpoint tensor that a rank of its stage has, by its numbers.

        None for a routed expert under EP: one rank has it whole, whichever.
        """
        tp = self.topology.group_of(rank, "tp")
        if _EXPERT.search(name):
            if self.topology.ep:
                return None
            # Without EP an expert is cut over all ranks of the stage, DP included.
            tp = self.topology.group_of(rank, "ep")
        i, ranks = tp.index(rank), len(tp)
        if name.endswith(_VOCABULARY):
            multiple = self.vocabulary_multiple
            rows = -(-numbers.shape[0] // multiple) * multiple // ranks
            return numbers[i * rows : (i + 1) * rows]
        if ".shared_experts." in name and self.whole_shared_experts:
            return numbers
        if any(part in name for part in _BY_KV_HEADS):
            repeats = max(1, ranks // self.kv_heads)
            return numbers.chunk(ranks // repeats)[i // repeats]
        if any(part in name for part in _BY_ROWS):
            return numbers.chunk(ranks)[i]
        if any(part in name for part in _BY_COLUMNS):
            return numbers.chunk(ranks, dim=1)[i]
        return numbers


def loaded_once(layout: Layout, numbering: Numbering, loaded: Sequence[Loaded]) -> Verdict:
    """Judge what all ranks have loaded.

    Args:
        layout: where parameters belong.
        numbering: of the checkpoint.
        loaded: each rank's parameters, by rank.

    Within a rank, parts of a packed parameter must be in order (q, k, v; gate, up), and an expert
    in the slot under which the rank's own map finds it.
    """
    counts = [_counts(rank.parameters, numbering.total) for rank in loaded]
    stages = _stages(layout.topology, numbering, counts)
    faults = chain(
        _unwritten(loaded),
        _misplaced(layout, numbering, loaded, counts, stages),
        _disordered(numbering, loaded),
    )
    return next(faults, None) or Verdict(
        name=_NAME,
        ok=True,
        what=f"{len(numbering.first)} tensors of the checkpoint, {numbering.total} elements, are "
        f"loaded once where they belong on {len(loaded)} ranks",
    )


def _counts(parameters: Mapping[str, torch.Tensor], total: int) -> torch.Tensor:
    """How often the rank has each element: int [total + 1]."""
    flat = torch.cat([numbers.flatten() for numbers in parameters.values()])
    return torch.bincount(flat.clamp(min=0), minlength=total + 1).to(torch.int16)


def _of(counts: torch.Tensor, numbering: Numbering, name: str) -> torch.Tensor:
    first = numbering.first[name]
    return counts[first : first + numbering.shapes[name].numel()]


def _stages(
    topology: Topology, numbering: Numbering, counts: Sequence[torch.Tensor]
) -> dict[str, int]:
    """The stage that each tensor belongs to: of a layer, the one that has most of its tensors."""
    stage_of = [topology.coordinates(rank)["pp"] for rank in range(len(counts))]
    votes: dict[str, list[int]] = {}
    for name in numbering.first:
        layer = _LAYER.search(name)
        if layer is None or _EXPERT.search(name):
            continue
        stages = {stage_of[rank] for rank, c in enumerate(counts) if _of(c, numbering, name).any()}
        votes.setdefault(layer.group(1), []).extend(sorted(stages))
    homes = {}
    for name in numbering.first:
        layer = _LAYER.search(name)
        if layer is None:
            homes[name] = 0 if "embed_tokens" in name else topology.pp - 1
        else:
            here = votes.get(layer.group(1)) or [0]
            homes[name] = max(sorted(set(here)), key=here.count)
    return homes


def _unwritten(loaded: Sequence[Loaded]) -> Iterator[Verdict]:
    for rank, of_rank in enumerate(loaded):
        for name, numbers in of_rank.parameters.items():
            if int(numbers.min()) >= 0:
                continue
            for mark, what, why in (
                (UNWRITTEN, "is not loaded", "its loader was not called, or wrote a part only"),
                (
                    NO_ELEMENT,
                    "holds what is no element of the checkpoint",
                    "its loader computed with the weights, or loaded them in parts of elements",
                ),
            ):
                found = int((numbers == mark).sum())
                if found:
                    size = numbers.numel()
                    part = "" if found == size else f", {found} of {size} elements"
                    where = f"{name}{part}, rank {rank}"
                    yield _fails(f"{name} {what}", where + _slot(of_rank, name, mark), why)


def _slot(of_rank: Loaded, name: str, mark: int) -> str:
    """Which experts of a parameter are meant, in words."""
    experts = of_rank.slots.get(name)
    if experts is None:
        return ""
    wrong = (of_rank.parameters[name] == mark).flatten(1).any(dim=1)
    return f", experts {[e for e, bad in zip(experts, wrong.tolist(), strict=True) if bad]}"


def _misplaced(
    layout: Layout,
    numbering: Numbering,
    loaded: Sequence[Loaded],
    counts: Sequence[torch.Tensor],
    stages: Mapping[str, int],
) -> Iterator[Verdict]:
    """The first wrong tensor of the checkpoint."""
    topology = layout.topology
    for name, home in stages.items():
        have = {r: _of(counts[r], numbering, name) for r in range(len(loaded))}
        at_home = [r for r in have if topology.coordinates(r)["pp"] == home]
        strangers = [r for r in have if r not in at_home and have[r].any()]
        if strangers:
            where = f"{name}, ranks {strangers}"
            why = f"its layer is on stage {home}, ranks {at_home}"
            yield _fails(f"{name} is loaded by another stage", where, why)
        numbers = numbering.numbers(name)
        expected = {r: layout.expected(name, numbers, r) for r in at_home}
        if any(part is None for part in expected.values()):
            yield from _wrong_owner(layout, name, {r: have[r] for r in at_home})
            continue
        first = numbering.first[name]
        for rank, part in expected.items():
            assert part is not None
            wanted = torch.zeros(numbers.numel(), dtype=torch.int16)
            wanted[(part - first).flatten()] = 1
            if not torch.equal(have[rank], wanted):
                others = {r: p for r, p in expected.items() if r != rank and p is not None}
                yield _explained(name, rank, have[rank], wanted, first, others)


def _wrong_owner(layout: Layout, name: str, have: Mapping[int, torch.Tensor]) -> Iterator[Verdict]:
    """A routed expert under EP that is not whole on exactly one rank of each EP group."""
    for group in layout.topology.groups["ep"]:
        owners = [rank for rank in group if rank in have and have[rank].any()]
        if not set(group) <= set(have):
            continue
        if not owners:
            where, why = f"{name}, ranks {list(group)}", "no rank of the group takes the expert"
            yield _fails(f"{name} is loaded by no rank", where, why)
        elif len(owners) > 1:
            where, why = f"{name}, ranks {owners}", "an expert belongs to one rank of its EP group"
            yield _fails(f"{name} is loaded by {len(owners)} ranks", where, why)
        elif not bool((have[owners[0]] == 1).all()):
            yield _explained(
                name, owners[0], have[owners[0]], torch.ones_like(have[owners[0]]), 0, {}
            )


def _explained(
    name: str,
    rank: int,
    have: torch.Tensor,
    wanted: torch.Tensor,
    first: int,
    others: Mapping[int, torch.Tensor],
) -> Verdict:
    where = f"{name}, rank {rank}"
    missing, extra = int((wanted > have).sum()), int(((have > 0) & (wanted == 0)).sum())
    twice = int((have > 1).sum())
    if not have.any():
        return _fails(f"{name} is not loaded", where, "the rank has no element of it")
    for other, part in others.items():
        swapped = torch.zeros_like(wanted)
        swapped[(part - first).flatten()] = 1
        if torch.equal(have, swapped):
            why = f"the rank has the part that belongs on rank {other}"
            return _fails(f"{name} has the wrong part", where, why)
    sizes = [
        f"{count} elements {word}"
        for count, word in (
            (missing, "are missing"),
            (extra, "belong on another rank"),
            (twice, "are loaded twice"),
        )
        if count
    ]
    what = f"{name} is loaded twice" if twice and not missing and not extra else ""
    return _fails(what or f"{name} has the wrong part", where, "; ".join(sizes))


def _disordered(numbering: Numbering, loaded: Sequence[Loaded]) -> Iterator[Verdict]:
    for rank, of_rank in enumerate(loaded):
        for name, numbers in of_rank.parameters.items():
            fault = order_fault(name, numbers, of_rank.slots.get(name), numbering)
            if fault:
                yield _fails(f"{name} {fault[0]}", f"{name}, rank {rank}", fault[1])


def _fails(what: str, where: str, why: str) -> Verdict:
    """`what` is a name and what is wrong with it; the latter is the kind of fault."""
    at, kind = what.split(" ", 1)
    return Verdict(name=_NAME, ok=False, what=what, where=where, why=why, kind=kind, at=at)
