"""Process groups along an axis of the topology, for programs that use torch.distributed alone."""

from __future__ import annotations

import torch.distributed as dist

from sim import RankContext, label_group


def axis_group(context: RankContext, axis: str) -> dist.ProcessGroup:
    """Make this rank's group along an axis; reports and the ledger call it by the axis' name.

    Every rank calls it, in the same order, as with `torch.distributed.new_group`. Each call makes
    new groups: call it once and keep the group.

    Raises:
        ValueError: the topology has no such axis.
    """
    if axis not in context.topology.groups:
        raise ValueError(f"no axis {axis!r}; use {', '.join(context.topology.groups)}")
    own = None
    for ranks in context.topology.groups[axis]:
        group = dist.new_group([*ranks])
        if context.rank in ranks:
            own = group
    assert own is not None, "every rank is in one group of each axis"
    label_group(own, axis)
    return own
