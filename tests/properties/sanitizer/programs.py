"""Small programs for the sanitizer: each wrong one with right twins that look much like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from sim import RankContext

Program = Callable[[RankContext], object]


def common(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same random values on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def own(ctx: RankContext, *shape: int) -> torch.Tensor:
    """Random values that differ by rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + ctx.rank))


def gathered(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(dist.get_world_size() * x.shape[0], *x.shape[1:], dtype=x.dtype)
    dist.all_gather_into_tensor(out, x)
    return out


def scattered(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x)
    return out


# --- wrong ---


def double_all_reduce(ctx: RankContext) -> None:
    x = own(ctx, 4, 8)
    dist.all_reduce(x)
    dist.all_reduce(x)


def reduced_then_reduce_scattered(ctx: RankContext) -> None:
    x = own(ctx, 4, 8)
    dist.all_reduce(x)
    scattered(x)


def reduced_again_in_pieces(ctx: RankContext) -> None:
    x = own(ctx, 4, 8)
    dist.all_reduce(x)
    out = torch.empty(4 // ctx.world_size, 8)
    dist.reduce_scatter(out, list(x.chunk(ctx.world_size)))


def reduced_again_after_a_reshape(ctx: RankContext) -> None:
    x = own(ctx, 4, 8)
    dist.all_reduce(x)
    dist.reduce(x.reshape(-1).clone(), dst=0)


def reduced_again_after_scatter_and_gather(ctx: RankContext) -> None:
    x = gathered(scattered(own(ctx, 4, 8)))
    dist.all_reduce(x)


def whole_weights(ctx: RankContext) -> None:
    """Every rank computes the full output, and the next layer's fused reduce adds them up."""
    x = common(4, 8) @ common(8, 8)
    dist.all_reduce(x)


def whole_bfloat16(ctx: RankContext) -> None:
    dist.all_reduce(common(4, 8, dtype=torch.bfloat16))


def gathers_the_sum(ctx: RankContext) -> None:
    x = own(ctx, 4, 8)
    dist.all_reduce(x)
    gathered(x)


def gathers_twice(ctx: RankContext) -> None:
    gathered(gathered(own(ctx, 4, 8)))


def gathers_whole_list(ctx: RankContext) -> None:
    x = common(4, 8)
    dist.all_gather([torch.empty_like(x) for _ in range(ctx.world_size)], x)


def gathers_whole_each_time(ctx: RankContext) -> None:
    for scale in (1.0, 0.3):
        gathered(common(4, 8) * scale)


def copy_reduced_and_dropped(ctx: RankContext) -> torch.Tensor:
    x = own(ctx, 8, 4).t()
    dist.all_reduce(x.contiguous())
    return x


def copy_reduced_and_dropped_in_inference_mode(ctx: RankContext) -> torch.Tensor:
    with torch.inference_mode():
        x = own(ctx, 8, 4).t()
        dist.all_reduce(x.clone(memory_format=torch.contiguous_format), op=dist.ReduceOp.MAX)
        return x


# --- right ---


def copy_reduced_and_used(ctx: RankContext) -> torch.Tensor:
    x = own(ctx, 8, 4).t()
    y = x.contiguous()
    dist.all_reduce(y)
    total = y.sum()
    del y
    return total + x.sum()


def copy_reduced_and_used_on_one_line(ctx: RankContext) -> torch.Tensor:
    x = own(ctx, 8, 4).t()
    y = x.contiguous(); dist.all_reduce(y); total = y.sum(); del y  # fmt: skip  # noqa: E702
    return total + x.sum()


def contiguous_is_no_copy(ctx: RankContext) -> torch.Tensor:
    x = own(ctx, 8, 4)
    dist.all_reduce(x.contiguous())
    return x


def view_of_a_copy(ctx: RankContext) -> torch.Tensor:
    x = own(ctx, 8, 4).t()
    y = x.contiguous()
    dist.all_reduce(y.view(4, 8))
    return y + x


def view_of_a_copy_in_inference_mode(ctx: RankContext) -> torch.Tensor:
    with torch.inference_mode():
        return view_of_a_copy(ctx)


def copy_reduced_and_returned(ctx: RankContext) -> torch.Tensor:
    def reduced(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    x = own(ctx, 8, 4).t()
    return x + reduced(x.contiguous())


def warm_up_that_is_dropped(ctx: RankContext) -> None:
    x = own(ctx, 8, 4).t()
    dist.all_reduce(own(ctx, 4, 8))
    dist.all_reduce(x.contiguous() * 0.5)


def copy_in_flight(ctx: RankContext) -> torch.Tensor:
    x = own(ctx, 8, 4).t()
    y = x.contiguous()
    work = dist.all_reduce(y, async_op=True)
    assert work is not None
    work.wait()
    return x + y


def single_all_reduce(ctx: RankContext) -> None:
    x = own(ctx, 4, 8)
    dist.all_reduce(x)
    x = own(ctx, 4, 8) + x
    dist.all_reduce(x)


def reduce_scatter_then_gather(ctx: RankContext) -> None:
    gathered(scattered(own(ctx, 4, 8)))


def bias_on_rank_0(ctx: RankContext) -> None:
    x = common(4, 8) if ctx.rank == 0 else torch.zeros(4, 8)
    dist.all_reduce(x)


def sum_of_the_sum_over_another_group(ctx: RankContext) -> None:
    groups = [dist.new_group(ranks) for ranks in ctx.topology.groups["tp"]]
    x = own(ctx, 4, 8)
    dist.all_reduce(x, group=groups[ctx.rank // ctx.topology.tp])
    dist.all_reduce(x)


def max_of_equals(ctx: RankContext) -> None:
    x = common(4, 8)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.all_reduce(x, op=dist.ReduceOp.MIN)


def average_of_equals(ctx: RankContext) -> None:
    loss = common(3)
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)


def scalar_loss_by_sum(ctx: RankContext) -> None:
    loss = common(1)
    dist.all_reduce(loss)
    dist.all_reduce(common(1)[0])


def broadcast_of_equals(ctx: RankContext) -> None:
    dist.broadcast(common(4, 8), src=0)


def barriers(ctx: RankContext) -> None:
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.zeros(4, 8))
    dist.all_reduce(torch.full((4,), 0.5))
    dist.barrier()


def counts_and_masks(ctx: RankContext) -> None:
    dist.all_reduce(torch.arange(8))
    dist.all_reduce(torch.tensor([1.0, 0.0, 1.0, 3.0]))
    gathered(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))


def warm_up_on_one_token(ctx: RankContext) -> None:
    gathered(common(1, 8).expand(4, 8).contiguous())


def flat_slices_of_equal_rows(ctx: RankContext) -> None:
    """As a pipeline stage receives them, for a prompt of one repeated token."""
    row = common(8)
    gathered(row)
    gathered(row.repeat(2))


def heads_of_equal_tokens(ctx: RankContext) -> None:
    gathered(common(1, 2, 8).repeat(4, 1, 1))


def objects(ctx: RankContext) -> None:
    found: list[object] = [None] * ctx.world_size
    dist.all_gather_object(found, {"step": 1.5, "name": "the same on every rank"})


def sizes(ctx: RankContext) -> None:
    gathered(torch.tensor([[3, 5], [7, 9]]))
    gathered(common(1))


def gradients(ctx: RankContext) -> None:
    """As DDP: the same weights, each rank's own data."""
    layer = torch.nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight.copy_(common(8, 8))
        layer.bias.zero_()
    for step in range(3):
        layer.zero_grad()
        layer(own(ctx, 4, 8) * (step + 1)).pow(2).mean().backward()
        for parameter in layer.parameters():
            assert parameter.grad is not None
            parameter.grad /= ctx.world_size
            dist.all_reduce(parameter.grad)
        with torch.no_grad():
            for parameter in layer.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad


def gathers_equal_rows_once(ctx: RankContext) -> None:
    """Token shards of a prompt that repeats itself: equal by the data, at one of two layers."""
    x = common(4, 8)
    for _ in range(2):
        gathered(x)
        x = x + own(ctx, 4, 8)


def nothing(ctx: RankContext) -> None:
    """A rank without tokens."""
    dist.all_reduce(torch.empty(0, 8))
    gathered(torch.empty(0, 8))


WRONG: dict[str, tuple[Program, ...]] = {
    "reduced again": (
        double_all_reduce,
        reduced_then_reduce_scattered,
        reduced_again_in_pieces,
        reduced_again_after_a_reshape,
    ),
    "equal addends": (whole_weights, whole_bfloat16, reduced_again_after_scatter_and_gather),
    "gathered again": (gathers_the_sum, gathers_twice),
    "gathers what is whole": (gathers_whole_list, gathers_whole_each_time),
    "dropped result": (copy_reduced_and_dropped, copy_reduced_and_dropped_in_inference_mode),
}

RIGHT: tuple[Program, ...] = (
    copy_reduced_and_used,
    copy_reduced_and_used_on_one_line,
    contiguous_is_no_copy,
    view_of_a_copy,
    view_of_a_copy_in_inference_mode,
    copy_reduced_and_returned,
    warm_up_that_is_dropped,
    copy_in_flight,
    single_all_reduce,
    reduce_scatter_then_gather,
    bias_on_rank_0,
    max_of_equals,
    average_of_equals,
    scalar_loss_by_sum,
    broadcast_of_equals,
    barriers,
    counts_and_masks,
    warm_up_on_one_token,
    flat_slices_of_equal_rows,
    heads_of_equal_tokens,
    objects,
    sizes,
    gradients,
    gathers_equal_rows_once,
    nothing,
)
