"""Attention DP with expert parallelism: gather all tokens over DP, experts, reduce-scatter.

Stands for vLLM's allgather_reducescatter backend and SGLang's attention DP without all-to-all.
Attention and the shared expert are sharded over TP, the experts over DP x TP:

    attention -> all-reduce(tp) -> gather(dp) -> experts -> reduce-scatter(dp) -> + shared
              -> all-reduce(tp) -> + residual
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from properties.faults.program import Program, Seat, Truth
from properties.faults.programs import tiny
from sim import Topology


def sizes(seat: Seat, count: int) -> list[int]:
    """How many tokens each DP rank has: their counts, gathered."""
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(seat.size("dp"))]
    dist.all_gather(counts, torch.tensor([count]), group=seat.group("dp"))
    return [int(each) for each in counts]


def pad(x: Tensor, rows: int) -> Tensor:
    """x [n, ...] with zero rows at the end: [rows, ...]."""
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def gather(seat: Seat, x: Tensor, counts: list[int]) -> Tensor:
    """[n, ...] of each DP rank -> [R * longest, ...], padded."""
    mine = pad(x, max(counts))
    parts = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(parts, mine, group=seat.group("dp"))
    return torch.cat(parts)


def unpad(whole: Tensor, counts: list[int]) -> Tensor:
    """[R * longest, H] -> [N, H], by a product with a matrix that selects, as kernels do it."""
    longest = max(counts)
    rows = [r * longest + i for r, count in enumerate(counts) for i in range(count)]
    select = torch.eye(len(whole), dtype=whole.dtype)[rows]
    return select @ whole


def start_ids(seat: Seat, ids: Tensor, counts: list[int]) -> tuple[list[Tensor], dist.Work | None]:
    """Begin to gather the token ids, beside the gather of the hidden states."""
    mine = pad(ids, max(counts))
    parts = [torch.zeros_like(mine) for _ in counts]
    return parts, dist.all_gather(parts, mine, group=seat.group("dp"), async_op=True)


def finish_ids(parts: list[Tensor], work: dist.Work | None, counts: list[int]) -> Tensor:
    """The token ids of all DP ranks, [N], once they are there."""
    if work is not None:
        work.wait()
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def experts(seat: Seat, x: Tensor, ids: Tensor) -> Tensor:
    """What this rank's experts add to all tokens: [N, H] -> [N, H], addends over EP."""
    return tiny.routed(tiny.weights(), x, ids, tiny.local_experts(seat))


def combine(seat: Seat, y: Tensor, counts: list[int]) -> Tensor:
    """[N, H] addends over EP -> [n, H] of this DP rank, addends over TP: the sum over DP."""
    longest = max(counts)
    mine = y.new_empty(longest, y.shape[1])
    dist.reduce_scatter(
        mine, [pad(p, longest) for p in torch.split(y, counts)], group=seat.group("dp")
    )
    return mine[: counts[seat.index("dp")]]


def shared(seat: Seat, x: Tensor) -> Tensor:
    """This rank's addend of the shared expert, sharded over TP."""
    return tiny.weights().shared.shard(seat.index("tp"), seat.size("tp"))(x)


def reduce(seat: Seat, routed_addend: Tensor, shared_addend: Tensor) -> Tensor:
    """The FFN's output, whole on each TP rank."""
    total = routed_addend + shared_addend
    dist.all_reduce(total, group=seat.group("tp"))
    return total


def moe(seat: Seat, x: Tensor, ids: Tensor) -> Tensor:
    """The MoE block: [n, H] of this DP rank -> [n, H]."""
    counts = sizes(seat, len(x))
    pending = start_ids(seat, ids, counts)
    whole = unpad(gather(seat, x, counts), counts)
    seat.tap("gathered", whole)
    all_ids = finish_ids(*pending, counts)
    seat.tap("ids", all_ids)
    addend = experts(seat, whole, all_ids)
    seat.tap("experts", addend, "partial:ep")
    mine = combine(seat, addend, counts)
    seat.tap(seat.own("routed"), mine, "partial:tp")
    common = shared(seat, x)
    seat.tap(seat.own("shared"), common, "partial:tp")
    return reduce(seat, mine, common)


def step(seat: Seat) -> None:
    """One layer."""
    w, ids = tiny.weights(), tiny.own_ids(seat)
    stream = w.embed[ids]
    attention = w.attention.shard(seat.index("tp"), seat.size("tp"))(stream)
    seat.tap(seat.own("attn"), attention, "partial:tp")
    dist.all_reduce(attention, group=seat.group("tp"))
    stream = stream + attention
    seat.tap(seat.own("residual"), stream)
    ffn = moe(seat, stream, ids)
    seat.tap(seat.own("ffn"), ffn)
    seat.tap(seat.own("stream"), stream + ffn)


def _truth(topology: Topology, tokens: tuple[int, ...]) -> Truth:
    ids = tiny.token_ids(tokens)
    whole = torch.cat(ids)

    def values(w: tiny.Weights) -> Mapping[str, Tensor]:
        attention = w.attention(w.embed[whole])
        residual = w.embed[whole] + attention
        routed = tiny.routed(w, residual, whole, range(tiny.EXPERTS))
        common = w.shared(residual)
        taps = {
            **tiny.by_rank("attn", attention, tokens),
            **tiny.by_rank("residual", residual, tokens),
        }
        taps |= {"gathered": residual, "ids": whole, "experts": routed}
        taps |= tiny.by_rank("routed", routed, tokens) | tiny.by_rank("shared", common, tokens)
        taps |= tiny.by_rank("ffn", routed + common, tokens)
        return taps | tiny.by_rank("stream", residual + routed + common, tokens)

    exact = values(tiny.weights().map(Tensor.double))
    parts = {
        f"dp{d}.ffn": {
            "the routed experts' output": exact[f"dp{d}.routed"],
            "the shared expert's output": exact[f"dp{d}.ffn"] - exact[f"dp{d}.routed"],
        }
        for d in range(topology.dp)
    }
    return tiny.truth(values, topology, layers=2, parts=parts)


PROGRAM = Program(
    name="gather-scatter",
    what="attention DP and expert parallelism by all-gather and reduce-scatter over DP",
    step=step,
    truth=_truth,
)
