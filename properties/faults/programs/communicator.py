"""A layer communicator that reduces on behalf of the layers, as in SGLang's attention DP.

Each FFN works on all DP ranks' tokens with weights over DP x TP, so it leaves addends. It reduces
them itself, unless the communicator has promised to do so when it hands each DP rank its tokens:

    gather(dp) -> FFN -> all-reduce(ep), unless promised -> scatter: reduces what was promised

Batches of equal size take one way, uneven ones another, as with SGLang's two kinds of padding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from properties.faults.program import Program, Seat, Truth
from properties.faults.programs import gather_scatter, tiny
from sim import Topology


class Communicator:
    """Gathers before an FFN and scatters after it."""

    def __init__(self, seat: Seat, counts: list[int]) -> None:
        """counts: tokens of each DP rank."""
        self.seat = seat
        self.counts = counts

    @property
    def even(self) -> bool:
        """Whether all DP ranks have as many tokens."""
        return len(set(self.counts)) == 1

    def reduces_experts(self) -> bool:
        """Whether the experts may leave their reduction to `scatter`."""
        return True

    def reduces_mlp(self) -> bool:
        """Whether the dense FFN may leave its reduction to `scatter`."""
        return True

    def gather(self, x: Tensor) -> Tensor:
        """[n, H] of this DP rank -> [N, H] of all."""
        whole = gather_scatter.gather(self.seat, x, self.counts)
        return gather_scatter.unpad(whole, self.counts)

    def scatter(self, y: Tensor, tap: str) -> Tensor:
        """[N, H] addends over EP -> [n, H] of this DP rank, summed.

        tap: under which to record the operand.
        """
        mine = self.scatter_even(y, tap) if self.even else self.scatter_uneven(y, tap)
        dist.all_reduce(mine, group=self.seat.group("tp"))
        return mine

    def scatter_even(self, y: Tensor, tap: str) -> Tensor:
        """[N, H] -> [n, H], summed over DP, where all have as many tokens."""
        self.seat.tap(tap, y, "partial:ep")
        mine = y.new_empty(self.counts[0], y.shape[1])
        dist.reduce_scatter(mine, [*torch.split(y, self.counts)], group=self.seat.group("dp"))
        return mine

    def scatter_uneven(self, y: Tensor, tap: str) -> Tensor:
        """[N, H] -> [n, H], summed over DP."""
        self.seat.tap(tap, y, "partial:ep")
        return gather_scatter.combine(self.seat, y, self.counts)


def mlp(seat: Seat, x: Tensor, reduce: bool) -> Tensor:
    """The dense FFN, sharded over EP: [N, H] -> [N, H], addends unless it reduces them."""
    y = tiny.weights().dense.shard(seat.index("ep"), seat.size("ep"))(x)
    if reduce:
        dist.all_reduce(y, group=seat.group("ep"))
    return y


def shared_shard(seat: Seat) -> tuple[int, int]:
    """Which shard of the shared expert this rank has, and of how many: those of the group over
    which its output is summed."""
    return seat.index("ep"), seat.size("ep")


def experts(seat: Seat, x: Tensor, ids: Tensor, reduce: bool) -> Tensor:
    """The routed experts and the shared one: [N, H] -> [N, H], likewise."""
    w = tiny.weights()
    y = tiny.routed(w, x, ids, tiny.local_experts(seat)) + w.shared.shard(*shared_shard(seat))(x)
    if reduce:
        dist.all_reduce(y, group=seat.group("ep"))
    return y


def step(seat: Seat) -> None:
    """A dense layer and one with experts; no attention."""
    ids = tiny.own_ids(seat)
    communicator = Communicator(seat, gather_scatter.sizes(seat, len(ids)))
    pending = gather_scatter.start_ids(seat, ids, communicator.counts)
    every = gather_scatter.finish_ids(*pending, communicator.counts)
    stream = tiny.weights().embed[ids]

    y = mlp(seat, communicator.gather(stream), reduce=not communicator.reduces_mlp())
    ffn = communicator.scatter(y, "layers.0.scattered")
    seat.tap(seat.own("layers.0.ffn"), ffn)
    stream = stream + ffn

    whole = communicator.gather(stream)
    y = experts(seat, whole, every, reduce=not communicator.reduces_experts())
    ffn = communicator.scatter(y, "layers.1.scattered")
    seat.tap(seat.own("layers.1.ffn"), ffn)
    seat.tap(seat.own("stream"), stream + ffn)


def _truth(topology: Topology, tokens: tuple[int, ...]) -> Truth:
    ids = torch.cat(tiny.token_ids(tokens))

    def values(w: tiny.Weights) -> Mapping[str, Tensor]:
        dense = w.dense(w.embed[ids])
        stream = w.embed[ids] + dense
        moe = tiny.routed(w, stream, ids, range(tiny.EXPERTS)) + w.shared(stream)
        return {
            "layers.0.scattered": dense,
            **tiny.by_rank("layers.0.ffn", dense, tokens),
            "layers.1.scattered": moe,
            **tiny.by_rank("layers.1.ffn", moe, tokens),
            **tiny.by_rank("stream", stream + moe, tokens),
        }

    return tiny.truth(values, topology, layers=2, parts=_parts(topology, ids))


def _parts(topology: Topology, ids: Tensor) -> dict[str, dict[str, Tensor]]:
    """What the experts' layer is a sum of: by expert, and by rank."""
    w = tiny.weights().map(Tensor.double)
    stream = w.embed[ids] + w.dense(w.embed[ids])
    routed = tiny.routed(w, stream, ids, range(tiny.EXPERTS))
    shared = w.shared(stream)
    parts = {"the routed experts' output": routed, "the shared expert's output": shared}
    world = topology.world_size
    each = tiny.EXPERTS // world
    for rank in range(world):
        own = tiny.routed(w, stream, ids, range(rank * each, (rank + 1) * each))
        others = routed + shared - own - w.shared.shard(rank, world)(stream)
        parts[f"what the ranks other than {rank} add"] = others
    return {"layers.1.scattered": parts}


PROGRAM = Program(
    name="communicator",
    what="a layer communicator that reduces on behalf of a dense layer and one with experts",
    step=step,
    truth=_truth,
)
