"""DistributedDataParallel under `rankfold run`: it ends, and averages as torch says it does."""

from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

from rankfold.cli import main

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))
<HOOK>
inputs = [torch.full((2, 4), 0.3 + r) for r in range(ranks)]
for _ in range(2):
    model.zero_grad()
    model(inputs[rank]).sum().backward()
    weight = model.module.weight.grad
    torch.testing.assert_close(weight, sum(inputs).sum(0).expand(4, 4) / ranks * <TIMES>)
"""
HOOK = """
def doubled(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    average = bucket.buffer().mul_(2 / ranks)
    future = dist.all_reduce(average, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
model.register_comm_hook(None, doubled)
"""


@pytest.mark.parametrize(("hook", "times"), [("", "1"), (HOOK, "2")])
@pytest.mark.parametrize("world", ["tp1", "tp3"])
def test_gradients_are_averaged_and_a_hook_is_honoured(
    tmp_path: Path, hook: str, times: str, world: str
) -> None:
    before = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook
    path = tmp_path / "program.py"
    path.write_text(SCRIPT.replace("<HOOK>", hook).replace("<TIMES>", times))
    assert main(["run", str(path), "--world", world, "--replicated", "weight"]) == 0
    after = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook
    assert before == after
