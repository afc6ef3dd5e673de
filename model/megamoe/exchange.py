"""Rows to the ranks that own their experts, and results back: the traffic of one MegaMoE launch.

Three exchanges over the expert-parallel group, whatever the tokens: how many rows each rank sends
to each expert; the rows; the results. A rank that does not launch leaves its peers waiting in the
first.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Which rows go where.

    Sent rows are in the order of (expert, token, slot), received ones in the order of (sending
    rank, expert, token, slot): it depends on the routing alone, so equal inputs give equal sums.
    """

    slots: torch.Tensor
    """int64 [sent]: position in the flattened [n, K] of each row sent."""
    sent: list[int]
    """Rows sent to each rank."""
    received: list[int]
    """Rows received from each rank."""
    local_ids: torch.Tensor
    """int64 [received]: this rank's expert for each row received."""


def plan(topk_ids: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> Plan:
    """Exchange the counts. topk_ids: int64 [n, K], global expert ids, below 0 for none."""
    ranks = dist.get_world_size(group)
    flat = topk_ids.flatten()
    order = flat.argsort(stable=True)
    slots = order[flat[order] >= 0]
    counts = torch.bincount(flat[slots], minlength=num_experts).view(ranks, -1)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    local = torch.arange(counts.shape[1], device=counts.device).repeat(ranks)
    return Plan(
        slots=slots,
        sent=counts.sum(dim=1).tolist(),
        received=arriving.sum(dim=1).tolist(),
        local_ids=local.repeat_interleave(arriving.flatten()),
    )


def dispatch(
    columns: tuple[torch.Tensor, ...], made: Plan, group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Send the plan's rows: one exchange for all columns, which travel side by side as bytes.

    columns: each [sent, width], of any dtype (not every transport knows every dtype), in the order
    of `made.slots`. Returns tensors of the same dtypes and widths, [received, width].
    """
    parts = [column.contiguous().view(torch.uint8) for column in columns]
    sent = torch.cat(parts, dim=1)
    received = sent.new_empty(sum(made.received), sent.shape[1])
    dist.all_to_all_single(received, sent, made.received, made.sent, group=group)
    widths = [part.shape[1] for part in parts]
    return tuple(
        part.contiguous().view(column.dtype)
        for part, column in zip(received.split(widths, dim=1), columns, strict=True)
    )


def combine(
    results: torch.Tensor, made: Plan, shape: tuple[int, int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send results back and sum each token's: float32 [n, H].

    results: bfloat16 [received, H], in the order of the rows received; shape: (n, K). A token's
    results are summed in the order of its slots, so the sum does not depend on which ranks own the
    experts; a token without any gets zero.
    """
    returned = results.new_empty(len(made.slots), results.shape[1])
    dist.all_to_all_single(returned, results, made.sent, made.received, group=group)
    tokens, top_k = shape
    by_slot = results.new_zeros(tokens * top_k, results.shape[1], dtype=torch.float32)
    by_slot[made.slots] = returned.to(torch.float32)
    total = results.new_zeros(tokens, results.shape[1], dtype=torch.float32)
    for slot in by_slot.unflatten(0, shape).unbind(dim=1):
        total += slot
    return total
