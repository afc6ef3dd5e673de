"""Tokens sent to their experts and back, in plain torch.distributed: none is lost or doubled.

pytest examples/pytest/test_dispatch.py
"""

import pytest
import torch
import torch.distributed as dist

from rankfold.testing import Worlds, assert_conserved, assert_ledger
from sim import RankContext

TOKENS = (3, 0, 5, 2)
"""Tokens of each rank; one has none, and takes part all the same."""
GENERATOR = torch.Generator().manual_seed(0)
ROWS = [torch.randn(tokens, 4, generator=GENERATOR) for tokens in TOKENS]
HOMES = [torch.randint(0, 4, (tokens,), generator=GENERATOR) for tokens in TOKENS]


def exchange(rows: torch.Tensor, sent: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Send `sent[r]` of the rows, in order, to rank r; also returns how many came from each."""
    counts = torch.empty(len(sent), dtype=torch.long)
    dist.all_to_all_single(counts, torch.tensor(sent))
    got = counts.tolist()
    received = rows.new_empty(sum(got), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), got, sent)
    return received, got


def there_and_back(ctx: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
    rows, homes = ROWS[ctx.rank], HOMES[ctx.rank]
    order = homes.argsort(stable=True)
    at_home, got = exchange(rows[order], homes.bincount(minlength=ctx.world_size).tolist())
    back, _ = exchange(at_home, got)
    return at_home, back[order.argsort()]


def test_every_token_goes_home_and_comes_back(world: Worlds) -> None:
    folded = world("dep4")
    results = folded.run(there_and_back)
    assert_conserved(ROWS, [at_home for at_home, _ in results], name="dispatched tokens")
    for rows, (_, back) in zip(ROWS, results, strict=True):
        assert torch.equal(rows, back)
    assert_ledger(folded, all_to_all_single=4)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_order_in_which_ranks_run_does_not_matter(world: Worlds, seed: int) -> None:
    plain, other = world("dep4").run(there_and_back), world("dep4", seed=seed).run(there_and_back)
    for (_, one), (_, two) in zip(plain, other, strict=True):
        assert torch.equal(one, two)
