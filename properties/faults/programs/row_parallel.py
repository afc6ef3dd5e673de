"""Row-parallel linear layers with a bias, and a norm behind one: each is right as it stands.

Each rank has a slice of the input features and of the weight's rows, so the layer's output is a
sum over TP, and a bias has to be in it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from properties.faults.program import Program, Seat, Truth
from properties.faults.programs import tiny
from properties.placement import shard_rows
from reference import unit_roundoff
from sim import Topology

EPSILON = 1e-6
"""Added to the mean square in a norm."""


def addend(seat: Seat, x: Tensor) -> Tensor:
    """This rank's addend of the layer's output without its bias: [T, H] -> [T, H]."""
    return tiny.weights().dense.shard(seat.index("tp"), seat.size("tp"))(x)


def summed(seat: Seat, y: Tensor) -> Tensor:
    """The sum over TP, on every rank."""
    dist.all_reduce(y, group=seat.group("tp"))
    return y


def norm(x: Tensor) -> Tensor:
    """RMS norm over the features, without a weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


def bias_on_rank_0(seat: Seat) -> None:
    """The bias goes into the first rank's addend alone."""
    y = addend(seat, tiny.weights().embed[tiny.own_ids(seat)])
    if seat.index("tp") == 0:
        y = y + tiny.weights().bias
    seat.tap(seat.own("addend"), y, "partial:tp")
    seat.tap(seat.own("output"), summed(seat, y))


def bias_divided(seat: Seat) -> None:
    """Each rank adds its part of the bias: one TP-th."""
    y = addend(seat, tiny.weights().embed[tiny.own_ids(seat)])
    y = y + tiny.weights().bias / seat.size("tp")
    seat.tap(seat.own("addend"), y, "partial:tp")
    seat.tap(seat.own("output"), summed(seat, y))


def bias_after_scatter(seat: Seat) -> None:
    """Sequence parallelism: the sum is scattered by token, and each rank adds the bias to its own
    rows."""
    x = tiny.weights().embed[tiny.own_ids(seat)]
    rows = shard_rows(len(x), seat.size("tp"))
    y = addend(seat, x)
    y = torch.cat([y, y.new_zeros(rows * seat.size("tp") - len(y), y.shape[1])])
    mine = y.new_empty(rows, y.shape[1])
    dist.reduce_scatter(mine, [*y.chunk(seat.size("tp"))], group=seat.group("tp"))
    seat.tap(seat.own("output"), mine + tiny.weights().bias, "shard:tp")


def reduced_again_before_norm(seat: Seat) -> None:
    """A sum that is whole is all-reduced once more, and then normalised: its scale is gone."""
    y = summed(seat, addend(seat, tiny.weights().embed[tiny.own_ids(seat)]))
    dist.all_reduce(y, group=seat.group("tp"))
    seat.tap(seat.own("normed"), norm(y))


def reduced_once_before_norm(seat: Seat) -> None:
    """The same without the second all-reduce."""
    y = summed(seat, addend(seat, tiny.weights().embed[tiny.own_ids(seat)]))
    seat.tap(seat.own("normed"), norm(y))


def _with_bias(*names: str) -> Callable[[Topology, tuple[int, ...]], Truth]:
    def truth(topology: Topology, tokens: tuple[int, ...]) -> Truth:
        ids = torch.cat(tiny.token_ids(tokens))

        def values(w: tiny.Weights) -> Mapping[str, Tensor]:
            taps: dict[str, Tensor] = {}
            for name in names:
                taps |= tiny.by_rank(name, w.dense(w.embed[ids]) + w.bias, tokens)
            return taps

        return tiny.truth(values, topology, layers=1)

    return truth


def _normed(topology: Topology, tokens: tuple[int, ...]) -> Truth:
    """The norm's output. Its input y is off by at most b, so y / rms(y) by 2 b / rms(y) and the
    norm's own roundings, H + 5 of a value of at most sqrt(H); a norm of R y adds epsilon to
    another mean square, which moves it by no more than epsilon / rms(y)^2 of itself."""
    ids = torch.cat(tiny.token_ids(tokens))
    before = tiny.truth(lambda w: {"y": w.dense(w.embed[ids])}, topology, layers=1)
    y, bound = before.taps["y"], before.bounds["y"]
    bounds, taps = {}, tiny.by_rank("normed", norm(y), tokens)
    smallest = float(y.pow(2).mean(-1).min()) if len(y) else 1.0
    largest = float(norm(y).abs().max()) if len(y) else 0.0
    own = (tiny.HIDDEN + 5) * unit_roundoff(torch.float32) + EPSILON / smallest
    for name in taps:
        bounds[name] = 2 * bound / smallest**0.5 + own * largest
    return Truth(taps=taps, bounds=bounds)


BIAS_ON_RANK_0 = Program(
    name="bias-on-rank-0",
    what="a row-parallel linear layer whose bias is in the first rank's addend",
    step=bias_on_rank_0,
    truth=_with_bias("addend", "output"),
)
BIAS_DIVIDED = Program(
    name="bias-divided",
    what="a row-parallel linear layer whose bias is spread evenly over the addends",
    step=bias_divided,
    truth=_with_bias("addend", "output"),
)
BIAS_AFTER_SCATTER = Program(
    name="bias-after-scatter",
    what="a row-parallel linear layer that reduce-scatters by token, and then adds its bias",
    step=bias_after_scatter,
    truth=_with_bias("output"),
)
REDUCED_AGAIN = Program(
    name="reduced-again-before-norm",
    what="an output that is all-reduced once too often, before an RMS norm",
    step=reduced_again_before_norm,
    truth=_normed,
)
REDUCED_ONCE = Program(
    name="reduced-once-before-norm",
    what="an output that is all-reduced once, before an RMS norm",
    step=reduced_once_before_norm,
    truth=_normed,
)
