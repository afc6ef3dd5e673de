"""Token shards over tp, gathered over tp.

rankfold run examples/scripts/wrong_group_gather_right.py --world dp2tp2
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"].get_local_rank(), mesh["dp"].get_local_rank()
    # Each replica has tokens of its own, the same on its two tp ranks.
    tokens = torch.randn(8, 4, generator=torch.Generator().manual_seed(dp))
    shard = tokens.chunk(2)[tp]
    full = [torch.empty_like(shard) for _ in range(2)]
    dist.all_gather(full, shard, group=mesh.get_group("tp"))
    print(torch.cat(full).sum())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
