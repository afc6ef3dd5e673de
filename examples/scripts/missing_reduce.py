"""A row-parallel layer that does not add up its terms, though its output is declared replicated.

rankfold run examples/scripts/missing_reduce.py --world tp4
"""

import torch
import torch.distributed as dist

from rankfold import replicated


def seeded(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, weight = seeded(0, 4, 16), seeded(1, 16, 8)
    # Row parallel: each rank has its part of the inner features, and so a term of the sum.
    out = x.chunk(ranks, dim=1)[rank] @ weight.chunk(ranks)[rank]
    replicated(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
