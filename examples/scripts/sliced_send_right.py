"""A stage gathers its token shards, and each rank sends one slice of the whole.

rankfold run examples/scripts/sliced_send_right.py --world tp2pp2
"""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    tp, stage = dist.get_rank() % 2, dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if stage == 0:
        tokens = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        hidden = torch.tanh(tokens.chunk(2)[tp])  # sequence parallel: each rank has its tokens
        full = [torch.empty(4, 4), torch.empty(4, 4)]
        dist.all_gather(full, hidden, group=groups[stage])
        dist.send(torch.cat(full).chunk(2)[tp], dist.get_rank() + 2)
    else:
        part = torch.empty(4, 4)
        dist.recv(part, dist.get_rank() - 2)
        dist.all_gather([torch.empty(4, 4), torch.empty(4, 4)], part, group=groups[stage])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
