"""Right programs of data parallelism: replicas, shards of weights, metrics, data."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sim import RankContext
from tests.properties.sanitizer.layouts import (
    Mesh,
    Program,
    gather,
    programs_of,
    scatter_sum,
    seeded,
    summed,
)
from tests.properties.sanitizer.programs import common, own

# --- data parallel ---


def ddp_average(ctx: RankContext) -> None:
    weight = common(8, 8)
    for step in range(3):
        grad = own(ctx, 8, 8) * weight * (step + 1)
        dist.all_reduce(grad, op=dist.ReduceOp.AVG)
        weight -= 0.1 * grad


def ddp_buckets_in_flight(ctx: RankContext) -> None:
    grads = [own(ctx, 8, 8) * k for k in range(1, 4)]
    for work in [dist.all_reduce(g, async_op=True) for g in grads]:
        assert work is not None
        work.wait()


def ddp_hook_that_divides_first(ctx: RankContext) -> None:
    grad = own(ctx, 8, 8).div_(ctx.world_size)
    summed(grad)


def broadcast_weights_then_metrics(ctx: RankContext) -> None:
    weight = own(ctx, 8, 8)
    dist.broadcast(weight, src=0)
    loss = (own(ctx, 4, 8) @ weight).pow(2).mean()
    dist.all_reduce(torch.tensor([4.0, loss.item()]))
    dist.all_reduce(loss)


def identical_replicas_by_moving_average(ctx: RankContext) -> None:
    """Each replica does the same, and averages: equal inputs to op=avg are right."""
    ema = common(8, 8)
    for step in range(3):
        ema.mul_(0.9).add_(seeded(step, 8, 8), alpha=0.1)
        dist.all_reduce(ema, op=dist.ReduceOp.AVG)


def local_sgd(ctx: RankContext) -> None:
    weight = common(8, 8)
    for _ in range(2):
        weight = weight - 0.1 * own(ctx, 8, 8)
        summed(weight)
        weight /= ctx.world_size


def gathers_losses(ctx: RankContext) -> None:
    loss = own(ctx, 1)
    dist.all_gather([torch.empty(1) for _ in range(ctx.world_size)], loss)
    gather(own(ctx, 5))


def sync_batch_norm(ctx: RankContext) -> None:
    x = own(ctx, 16, 8)
    total = torch.cat([x.sum(0), x.pow(2).sum(0), torch.tensor([float(len(x))])])
    summed(total)
    mean = total[:8] / total[-1]
    (x - mean) / (total[8:16] / total[-1] - mean.pow(2)).sqrt()


def sync_batch_norm_by_gather(ctx: RankContext) -> None:
    x = own(ctx, 16, 8)
    gather(torch.stack([x.mean(0), x.var(0)]))


def gradient_clipping(ctx: RankContext) -> None:
    shards = [own(ctx, 4, 4), own(ctx, 8)]
    square = torch.stack([shard.pow(2).sum() for shard in shards]).sum()
    summed(square)
    [shard.mul_(1.0 / square.sqrt()) for shard in shards]


def found_inf_flag(ctx: RankContext) -> None:
    flag = torch.zeros(1)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    dist.all_reduce(flag)


def object_lists(ctx: RankContext) -> None:
    found: list[object] = [None] * ctx.world_size
    dist.all_gather_object(found, {"loss": 0.5, "rank": ctx.rank})
    dist.gather_object("done", [None] * ctx.world_size if ctx.rank == 0 else None, dst=0)
    dist.broadcast_object_list([{"lr": 0.1}], src=0)


def zero_optimizer(ctx: RankContext) -> None:
    """ZeRO 1: gradients reduce-scattered, the own slice of the weights updated, all gathered."""
    weight = common(8, 4)
    for step in range(2):
        grad = scatter_sum(own(ctx, 8, 4) * (step + 1))
        mine = weight.chunk(ctx.world_size)[ctx.rank]
        mine -= 0.1 * grad
        weight = gather(mine)


def fsdp(ctx: RankContext) -> None:
    shard = common(8, 4).chunk(ctx.world_size)[ctx.rank].clone()
    for _ in range(2):
        weight = gather(shard)
        shard -= 0.1 * scatter_sum(own(ctx, 8, 4) * weight)


def fsdp_of_a_view(ctx: RankContext) -> None:
    gather(common(8, 4).chunk(ctx.world_size)[ctx.rank])


def hybrid_sharding(ctx: RankContext) -> None:
    """HSDP: sharded over tp here, replicated over dp."""
    mesh = Mesh(ctx)
    shard = common(8, 4).chunk(2)[mesh.t]
    for _ in range(2):
        weight = gather(shard, mesh.tp)
        grad = scatter_sum(own(ctx, 8, 4) * weight, mesh.tp)
        dist.all_reduce(grad, op=dist.ReduceOp.AVG, group=mesh.dp)
        shard = shard - 0.1 * grad


def fsdp_with_tensor_parallel(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    columns = common(8, 4).chunk(2)[mesh.t]
    weight = gather(columns.chunk(2)[mesh.d], mesh.dp)
    summed(own(ctx, 4, 4) @ weight.t(), mesh.tp)


# --- others ---


def parameter_server(ctx: RankContext) -> None:
    weight = common(8, 8)
    dist.reduce(own(ctx, 8, 8), dst=0)
    dist.broadcast(weight, src=0)


def scatter_of_data_and_gather_of_results(ctx: RankContext) -> None:
    part = torch.empty(2, 4)
    dist.scatter(part, list(own(ctx, 8, 4).chunk(4)) if ctx.rank == 0 else None, src=0)
    results = part @ common(4, 4)
    dist.gather(results, [torch.empty(2, 4) for _ in range(4)] if ctx.rank == 0 else None, dst=0)


def scatter_over_all_then_gather_in_each_replica(ctx: RankContext) -> None:
    """Two replicas get half of the batch each: cut for all ranks, put together over tp."""
    mesh = Mesh(ctx)
    part = torch.empty(2, 4)
    dist.scatter(part, list(own(ctx, 8, 4).chunk(4)) if ctx.rank == 0 else None, src=0)
    gather(part, mesh.tp)


def uneven_gather_by_padding(ctx: RankContext) -> None:
    rows = torch.tensor([[ctx.rank + 1, 0]])
    most = int(gather(rows)[:, 0].max())
    padded = torch.zeros(most, 4)
    padded[: ctx.rank + 1] = own(ctx, ctx.rank + 1, 4)
    gather(padded)


def average_of_lazily_equal_gradients(ctx: RankContext) -> None:
    """Every rank has the same data, as in many a demonstration; the average is right."""
    size = float(dist.get_world_size())
    weight = torch.nn.Parameter(common(8, 8))
    (weight * common(8, 8)).sum().backward()
    assert weight.grad is not None
    dist.all_reduce(weight.grad.data, op=dist.ReduceOp.SUM)
    weight.grad.data /= size


def average_by_a_helper(ctx: RankContext) -> None:
    def averaged(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x / dist.get_world_size()

    averaged(averaged(common(4, 8)))


def replicas_are_checked(ctx: RankContext) -> None:
    weight = common(8, 8)
    found = [torch.empty_like(weight) for _ in range(ctx.world_size)]
    dist.all_gather(found, weight)
    for other in found:
        assert torch.equal(other, weight)


def replicas_are_checked_after_the_average(ctx: RankContext) -> None:
    grad = summed(own(ctx, 4, 8))
    everyone = gather_and_keep = torch.empty(4 * ctx.world_size, 8)
    dist.all_gather_into_tensor(gather_and_keep, grad)
    parts = gather_and_keep.chunk(ctx.world_size)
    assert all(torch.allclose(part, parts[0]) for part in parts) and len(everyone)


RIGHT: tuple[Program, ...] = programs_of(globals())
