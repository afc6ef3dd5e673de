"""A tensor-parallel MLP whose output is reduced twice: by the layer, and by its caller.

rankfold run examples/scripts/double_all_reduce.py --world tp4
"""

import torch
import torch.distributed as dist
from torch import nn

HIDDEN, INNER = 16, 32


class Mlp(nn.Module):
    """Each rank holds a slice of the inner features, and a partial sum of the output."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER // ranks, bias=False)
        self.down = nn.Linear(INNER // ranks, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        dist.all_reduce(y)
        return y


@torch.no_grad()
def main() -> None:
    dist.init_process_group("gloo")
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1 + dist.get_rank())
    y = Mlp(dist.get_world_size())(x)
    dist.all_reduce(y)  # wrong: the layer has done it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
