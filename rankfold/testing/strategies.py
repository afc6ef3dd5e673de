"""Hypothesis strategies for worlds: topologies, and the token counts at which layouts break."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from sim import Topology

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def topologies(
    *,
    max_ranks: int = 8,
    axes: tuple[str, ...] = ("tp", "pp"),
    ep: bool = False,
    min_ranks: int = 2,
) -> SearchStrategy[Topology]:
    """Topologies whose degrees are powers of two; they shrink to the fewest ranks.

    Args:
        max_ranks: at most so many ranks.
        axes: the axes that may have more than one rank: "tp", "pp" and "dp".
        ep: whether experts may be spread over the DP x TP ranks as well.
        min_ranks: at least so many ranks.

    Raises:
        ValueError: an axis means nothing, or no topology fits.
    """
    if unknown := set(axes) - {"tp", "pp", "dp"}:
        raise ValueError(f"no axes {sorted(unknown)}; use tp, pp and dp, and ep=True for experts")
    degrees = [1 << power for power in range(max(max_ranks, 1).bit_length())]
    of = {axis: degrees if axis in axes else [1] for axis in ("tp", "pp", "dp")}
    fitting = [
        Topology(tp=tp, pp=pp, dp=dp, ep=spread)
        for dp in of["dp"]
        for pp in of["pp"]
        for tp in of["tp"]
        for spread in ((False, True) if ep and dp * tp > 1 else (False,))
        if min_ranks <= tp * pp * dp <= max_ranks
    ]
    if not fitting:
        raise ValueError(f"no topology over {axes} has {min_ranks} to {max_ranks} ranks")
    # Hypothesis shrinks towards the first.
    return st.sampled_from(sorted(fitting, key=lambda t: (t.world_size, t.dp, t.pp, t.ep)))


def token_counts(topology: Topology | str | int) -> SearchStrategy[int]:
    """Numbers of tokens at which sharding breaks; they shrink towards none.

    0, 1, R - 1, R, R + 1, 2 R and the first primes above R, for the R ranks of TP (also to be
    given as a number).
    """
    if isinstance(topology, str):
        topology = Topology.parse(topology)
    ranks = topology if isinstance(topology, int) else topology.tp
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; use 1 or more")
    primes = [prime for prime in _PRIMES if prime > ranks][:3]
    return st.sampled_from(sorted({0, 1, ranks - 1, ranks, ranks + 1, 2 * ranks, *primes}))
