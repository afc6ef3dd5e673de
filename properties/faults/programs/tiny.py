"""The tiny model of the stand-in programs: its weights, tokens, and what it computes in float64.

Every part is a product of two matrices with a ReLU between, so the largest error of a float32 run
can be stated: the same computation on absolute values gives the magnitude of everything that is
summed, and n roundings of a sum are no more than n u / (1 - n u) of that (N. J. Higham, Accuracy
and Stability of Numerical Algorithms, Lemmas 3.1 and 3.5; ReLU makes no error larger). These
models are so small that the worst case is far below any fault, so nothing is estimated.

Experts are chosen by a table of token ids, as in hash routing: a choice is never a near tie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from properties.faults.program import Seat, Truth
from reference import unit_roundoff
from sim import Topology

HIDDEN = 8
WIDTH = 16
"""Features inside attention, the dense FFN, an expert and the shared expert."""
EXPERTS = 8
TOP_K = 2
VOCABULARY = 64


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two matrices: x -> relu(x @ up) @ down."""

    up: Tensor
    """[..., H, WIDTH]."""
    down: Tensor
    """[..., WIDTH, H]."""

    def shard(self, index: int, count: int) -> Pair:
        """The columns of `up` and rows of `down` of one of `count` ranks."""
        up, down = self.up.chunk(count, -1)[index], self.down.chunk(count, -2)[index]
        return Pair(up=up, down=down)

    def of(self, expert: int) -> Pair:
        """One expert's."""
        return Pair(up=self.up[expert], down=self.down[expert])

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return torch.relu(x @ self.up) @ self.down

    def map(self, change: Callable[[Tensor], Tensor]) -> Pair:
        """With both matrices changed."""
        return Pair(up=change(self.up), down=change(self.down))


@dataclass(frozen=True, kw_only=True)
class Weights:
    """All weights, whole."""

    embed: Tensor
    """[V, H]."""
    attention: Pair
    dense: Pair
    experts: Pair
    """With a leading dim E."""
    shared: Pair
    bias: Tensor
    """[H], of a row-parallel linear layer."""
    chosen: Tensor
    """int64 [V, K]: the experts of each token id, distinct."""
    share: Tensor
    """[V, K]: how much each of them counts; a row sums to 1."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """With every floating-point weight changed."""
        return Weights(
            embed=change(self.embed),
            attention=self.attention.map(change),
            dense=self.dense.map(change),
            experts=self.experts.map(change),
            shared=self.shared.map(change),
            bias=change(self.bias),
            chosen=self.chosen,
            share=change(self.share),
        )


@functools.cache
def weights() -> Weights:
    """The weights, float32; the same on every machine."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def pair(*lead: int) -> Pair:
        up = normal(*lead, HIDDEN, WIDTH) * HIDDEN**-0.5
        return Pair(up=up.float(), down=(normal(*lead, WIDTH, HIDDEN) * WIDTH**-0.5).float())

    order = torch.rand(VOCABULARY, EXPERTS, generator=generator).argsort(-1)
    return Weights(
        embed=normal(VOCABULARY, HIDDEN).float(),
        attention=pair(),
        dense=pair(),
        experts=pair(EXPERTS),
        shared=pair(),
        bias=normal(HIDDEN).float(),
        chosen=order[:, :TOP_K],
        share=normal(VOCABULARY, TOP_K).softmax(-1).float(),
    )


def token_ids(tokens: tuple[int, ...]) -> list[Tensor]:
    """The token ids of each DP rank, int64 [n]: all different, so that no rows are alike.

    Raises:
        ValueError: more tokens than ids.
    """
    if sum(tokens) > VOCABULARY:
        raise ValueError(f"{sum(tokens)} tokens: use {VOCABULARY} at most")
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(5))
    return [*torch.split(order[: sum(tokens)], list(tokens))]


def own_ids(seat: Seat) -> Tensor:
    """This rank's token ids, int64 [n]."""
    return token_ids(seat.tokens)[seat.index("dp")]


def local_experts(seat: Seat) -> range:
    """The experts of this rank: spread evenly over its EP group."""
    count = EXPERTS // seat.size("ep")
    return range(seat.index("ep") * count, (seat.index("ep") + 1) * count)


def routed(w: Weights, x: Tensor, ids: Tensor, experts: range) -> Tensor:
    """What these experts add to each token: [T, H], of tokens x [T, H] with ids [T]."""
    total = torch.zeros_like(x)
    for expert in experts:
        counts = torch.where(w.chosen[ids] == expert, w.share[ids], 0).sum(-1, keepdim=True)
        total += counts * w.experts.of(expert)(x)
    return total


def by_rank(name: str, whole: Tensor, tokens: tuple[int, ...]) -> dict[str, Tensor]:
    """The rows [N, ...] of each DP rank as a tap of its own."""
    return {f"dp{d}.{name}": part for d, part in enumerate(torch.split(whole, list(tokens)))}


def truth(
    values: Callable[[Weights], Mapping[str, Tensor]],
    topology: Topology,
    *,
    layers: int,
    parts: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Truth:
    """A program's truth with its bounds.

    Args:
        values: the taps from the whole weights, in their dtype; ids may be among them.
        topology: the ranks' layout.
        layers: pairs of products that follow one another, at most.
        parts: what taps are sums of.
    """
    exact = values(weights().map(Tensor.double))
    magnitude = values(weights().map(lambda w: w.double().abs()))
    # In a pair: two products, their bias, shares, sums over experts, over ranks and the residual.
    terms = layers * (HIDDEN + WIDTH + 2 * EXPERTS + topology.world_size + 4)
    u = unit_roundoff(torch.float32)
    relative = terms * u / (1 - terms * u)
    return Truth(
        taps=exact,
        bounds={
            name: relative * float(value.max()) if value.is_floating_point() and len(value) else 0.0
            for name, value in magnitude.items()
        },
        parts=parts or {},
    )
