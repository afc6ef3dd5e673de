"""An all-reduce of a contiguous copy, whose result nobody keeps.

rankfold run examples/scripts/dropped_reduce.py --world tp4
"""

import torch
import torch.distributed as dist


def reduced(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x.contiguous())  # wrong: reduces a copy, and drops it
    return x


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    x = torch.randn(8, 4).t()  # not contiguous
    print(reduced(x).sum())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
