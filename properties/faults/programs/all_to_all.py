"""Attention DP with expert parallelism by all-to-all: each token goes only where its experts are.

Stands for DeepEP and vLLM's naive all2all under TP attention. The tokens of a DP rank are the same
on all its TP ranks, so each of them dispatches its share, and they join the results:

    split(tp) -> dispatch(ep) -> grouped experts -> return(ep) -> weighted sum -> join(tp)
              -> + shared expert on the DP rank's own tokens

Small batches take a shorter way: all ranks gather all tokens and sum over EP.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from properties.faults.program import Program, Seat, Truth
from properties.faults.programs import gather_scatter, tiny
from properties.placement import shard_rows
from sim import Topology

SMALL = 1
"""Most tokens of any DP rank for the shorter way."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the copies of a rank's tokens go, token by token and expert by expert."""

    owner: Tensor
    """int64 [n, K]: the EP rank that has the expert."""
    expert: Tensor
    """int64 [n, K]: its number there."""
    slot: Tensor
    """int64 [n, K]: which of this rank's copies to that owner it is."""


def plan(ids: Tensor, ranks: int) -> Plan:
    """The plan for token ids [n], with the experts spread evenly over `ranks`."""
    each = tiny.EXPERTS // ranks
    chosen = tiny.weights().chosen[ids]
    owner = chosen // each
    flat = owner.flatten()
    before = [int((flat[:i] == flat[i]).sum()) for i in range(len(flat))]
    slot = torch.tensor(before, dtype=torch.int64).view(owner.shape)
    return Plan(owner=owner, expert=chosen % each, slot=slot)


def share(seat: Seat, x: Tensor) -> Tensor:
    """This TP rank's rows of what all TP ranks have: [n, ...] -> [<= ceil(n / TP), ...]."""
    rows = shard_rows(len(x), seat.size("tp"))
    start = seat.index("tp") * rows
    return x[start : start + rows]


def shared_rows(seat: Seat, count: int) -> int:
    """Rows of each TP rank's share of `count` tokens, pads included."""
    return shard_rows(count, seat.size("tp"))


def join(seat: Seat, mine: Tensor, count: int) -> Tensor:
    """The shares of all TP ranks -> [n, H] of this DP rank, where n is `count`."""
    mine = gather_scatter.pad(mine, shared_rows(seat, count))
    parts = [torch.empty_like(mine) for _ in range(seat.size("tp"))]
    dist.all_gather(parts, mine, group=seat.group("tp"))
    return torch.cat(parts)[:count]


def loads(seat: Seat, planned: Plan) -> Tensor:
    """How many copies each EP rank sends here for each expert: int64 [R, experts here]."""
    ranks, each = seat.size("ep"), tiny.EXPERTS // seat.size("ep")
    number = (planned.owner * each + planned.expert).flatten()
    sent = torch.bincount(number, minlength=tiny.EXPERTS).view(ranks, each)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=seat.group("ep"))
    return received


def capacity(seat: Seat, planned: Plan) -> int:
    """Slots for each pair of ranks: as many as the fullest needs, so that nothing is dropped."""
    needed = torch.tensor([int(planned.slot.max()) + 1 if planned.slot.numel() else 0])
    dist.all_reduce(needed, op=dist.ReduceOp.MAX, group=seat.group("ep"))
    return int(needed)


def fill(planned: Plan, values: Tensor, ranks: int, slots: int, empty: float) -> Tensor:
    """The send buffer [R, slots, ...] with a value of `values` [n, K, ...] for each copy."""
    buffer = values.new_full((ranks, slots, *values.shape[2:]), empty)
    fits = planned.slot < slots
    buffer[planned.owner[fits], planned.slot[fits]] = values[fits]
    return buffer


def swap(seat: Seat, buffer: Tensor) -> Tensor:
    """All-to-all of equal parts over EP: row r goes to rank r, and comes from it."""
    received = torch.empty_like(buffer)
    dist.all_to_all_single(received, buffer.contiguous(), group=seat.group("ep"))
    return received


def received_experts(arrived: Tensor, counts: Tensor) -> Tensor:
    """The expert of each slot, int64 [R, slots], -1 in slots past what a rank has sent.

    arrived: as it is in the buffer, which a kernel writes only as far as it receives.
    counts: int64 [R].
    """
    past = torch.arange(arrived.shape[1]) >= counts[:, None]
    return arrived.masked_fill(past, -1)


def grouped(seat: Seat, x: Tensor, expert: Tensor, sizes: Tensor) -> Tensor:
    """The experts on the slots [S, H], in groups: slots in order of their expert [S].

    sizes: how many slots each expert has, int64 [experts here]. Slots without one come last, and
    give zero.
    """
    last = len(sizes)
    order = torch.where(expert < 0, last, expert).argsort(stable=True)
    output = torch.zeros_like(x)
    start = 0
    for number, size in zip(tiny.local_experts(seat), sizes.tolist(), strict=True):
        rows = order[start : start + size]
        output[rows] = tiny.weights().experts.of(number)(x[rows])
        start += size
    return output


def group_sizes(load: Tensor) -> Tensor:
    """How many slots each expert here has: int64 [R, experts here] -> [experts here]."""
    return load.sum(0)


def dispatch(seat: Seat, x: Tensor, ids: Tensor) -> Tensor:
    """The routed experts on this rank's tokens: [n, H] -> [n, H]."""
    ranks = seat.size("ep")
    planned = plan(ids, ranks)
    load = loads(seat, planned)
    slots = capacity(seat, planned)
    copies = x[:, None].expand(-1, tiny.TOP_K, -1)
    hidden = swap(seat, fill(planned, copies, ranks, slots, 0.0))
    # What a kernel leaves in the slots that it does not write: here, the last expert.
    old = len(tiny.local_experts(seat)) - 1
    arrived = swap(seat, fill(planned, planned.expert, ranks, slots, old))
    expert = received_experts(arrived, load.sum(1))
    # Counted from 1, so that an empty slot is zero.
    seat.tap(f"ep{seat.index('ep')}.slots", expert.flatten() + 1)
    result = grouped(seat, hidden.flatten(0, 1), expert.flatten(), group_sizes(load))
    back = swap(seat, result.view(ranks, slots, -1))
    return weighted(planned, back, ids, slots)


def weighted(planned: Plan, back: Tensor, ids: Tensor, slots: int) -> Tensor:
    """The weighted sum of each token's results, which came back to [R, slots, H]: [n, H]."""
    fits = (planned.slot < slots)[..., None]
    results = torch.where(fits, back[planned.owner, planned.slot.clamp(max=slots - 1)], 0.0)
    return (tiny.weights().share[ids][..., None] * results).sum(1)


def gather_all(seat: Seat, x: Tensor, ids: Tensor, counts: list[int]) -> Tensor:
    """The shorter way: [n, H] of this DP rank -> [n, H]."""
    whole = gather_scatter.unpad(gather_scatter.gather(seat, x, counts), counts)
    pending = gather_scatter.start_ids(seat, ids, counts)
    y = gather_scatter.experts(seat, whole, gather_scatter.finish_ids(*pending, counts))
    dist.all_reduce(y, group=seat.group("ep"))
    return torch.split(y, counts)[seat.index("dp")]


def is_small(counts: list[int], own: int) -> bool:
    """Whether the batch takes the shorter way; all ranks have to agree.

    counts: tokens of each DP rank; own: of this one.
    """
    return max(counts) <= SMALL


def step(seat: Seat) -> None:
    """One MoE block."""
    ids = tiny.own_ids(seat)
    x = tiny.weights().embed[ids]
    counts = gather_scatter.sizes(seat, len(ids))
    if is_small(counts, len(ids)):
        routed = gather_all(seat, x, ids, counts)
    else:
        mine = dispatch(seat, share(seat, x), share(seat, ids))
        routed = join(seat, mine, len(ids))
    _finish(seat, x, routed)


def step_unsplit(seat: Seat) -> None:
    """The same, but every TP rank dispatches all tokens of its DP rank."""
    ids = tiny.own_ids(seat)
    x = tiny.weights().embed[ids]
    counts = gather_scatter.sizes(seat, len(ids))
    small = is_small(counts, len(ids))
    _finish(seat, x, gather_all(seat, x, ids, counts) if small else dispatch(seat, x, ids))


def _finish(seat: Seat, x: Tensor, routed: Tensor) -> None:
    seat.tap(seat.own("routed"), routed)
    # Whole weights on every rank, for the DP rank's own tokens.
    seat.tap(seat.own("ffn"), routed + tiny.weights().shared(x))


def _truth(topology: Topology, tokens: tuple[int, ...], split: bool = True) -> Truth:
    each = tiny.token_ids(tokens)
    whole = torch.cat(each)

    def values(w: tiny.Weights) -> Mapping[str, Tensor]:
        x = w.embed[whole]
        routed = tiny.routed(w, x, whole, range(tiny.EXPERTS))
        slots = {} if max(tokens) <= SMALL else _slots(topology, each, split)
        return {
            **slots,
            **tiny.by_rank("routed", routed, tokens),
            **tiny.by_rank("ffn", routed + w.shared(x), tokens),
        }

    return tiny.truth(values, topology, layers=1, parts=_parts(topology, each))


def _slots(topology: Topology, each: list[Tensor], split: bool) -> dict[str, Tensor]:
    """The expert of each slot on each EP rank, counted from 1; 0 for an empty slot."""
    ranks = topology.world_size
    plans = []
    for rank in range(ranks):
        place = topology.coordinates(rank)
        ids = each[place["dp"]]
        if split:
            rows = shard_rows(len(ids), topology.tp)
            ids = ids[place["tp"] * rows : (place["tp"] + 1) * rows]
        plans.append(plan(ids, ranks))
    slots = max(int(p.slot.max()) + 1 if p.slot.numel() else 0 for p in plans)
    sent = [fill(p, p.expert, ranks, slots, -1) for p in plans]
    return {f"ep{r}.slots": torch.stack([s[r] for s in sent]).flatten() + 1 for r in range(ranks)}


def _parts(topology: Topology, each: list[Tensor]) -> dict[str, dict[str, Tensor]]:
    """What the routed experts' output is a sum of: what each rank's experts add."""
    w = tiny.weights().map(Tensor.double)
    count = tiny.EXPERTS // topology.world_size
    return {
        f"dp{d}.routed": {
            f"what the experts of rank {r} add": tiny.routed(
                w, w.embed[ids], ids, range(r * count, (r + 1) * count)
            )
            for r in range(topology.world_size)
        }
        for d, ids in enumerate(each)
    }


PROGRAM = Program(
    name="all-to-all",
    what="attention DP and expert parallelism by all-to-all, each TP rank with its share",
    step=step,
    truth=_truth,
)
UNSPLIT = Program(
    name="all-to-all-unsplit",
    what="the same, where every TP rank dispatches all tokens of its DP rank",
    step=step_unsplit,
    truth=functools.partial(_truth, split=False),
)
