"""Aux hidden states of a stream sharded by token, on their way to the last stage (class E)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from properties.faults.fault import Fault
from properties.faults.patches import (
    MEGA,
    Method,
    overlay_model,
    replaced,
    wrapped,
)

Tensors = dict[str, torch.Tensor]


@contextmanager
def published_by_rank_0() -> Iterator[None]:
    """Of a stage's aux hidden states, which are token shards, TP rank 0's go on as if whole."""

    def first_shard(own: Method) -> Method:
        def gather(self: Any, outputs: Mapping[str, torch.Tensor], tokens: int) -> Tensors:
            whole = own(self, outputs, tokens)
            rows = next(iter(outputs.values())).shape[0]
            aux = {name for name in whole if name.startswith(self.AUX_HIDDEN_STATE_KEY)}
            return {n: value[:rows].clone() if n in aux else value for n, value in whole.items()}

        return gather

    with wrapped(overlay_model(), "gather_stage_outputs", first_shard):
        yield


@contextmanager
def last_stage_leaves_shards() -> Iterator[None]:
    """The last stage gathers its normed output, and not its own aux hidden states."""

    def stream_only(own: Method) -> Method:
        def gather(self: Any, outputs: Iterable[torch.Tensor], tokens: int) -> list[torch.Tensor]:
            hidden, *aux = outputs
            return [*own(self, [hidden], tokens), *aux]

        return gather

    with wrapped(overlay_model(), "gather_final_outputs", stream_only):
        yield


@contextmanager
def received_gathered_again() -> Iterator[None]:
    """The last stage gathers all its aux hidden states, also those that it received whole."""

    def again(own: Method) -> Method:
        def merge(self: Any, remote: list[torch.Tensor], local: list[torch.Tensor]) -> Any:
            from vllm.models.common.ops.sequence_parallel import sp_all_gather

            return own(self, [sp_all_gather(value) for value in remote], local)

        return merge

    with wrapped(overlay_model(), "merge_aux", again):
        yield


@contextmanager
def received_sharded_and_left() -> Iterator[None]:
    """On entry all that was received is sharded, also the aux hidden states that only pass."""

    def all_of_it(self: Any, received: Mapping[str, torch.Tensor]) -> Tensors:
        from vllm.models.common.ops.sequence_parallel import sp_shard

        return {name: sp_shard(value) for name, value in received.items()}

    with replaced(overlay_model(), "shard_on_entry", all_of_it):
        yield


@contextmanager
def unpacked_from_the_second() -> Iterator[None]:
    """What a stage packs into one tensor for its gather is unpacked from the second part on."""

    def rotated(own: Method) -> Method:
        def gather(self: Any, outputs: Mapping[str, torch.Tensor], tokens: int) -> Tensors:
            first, *rest = own(self, outputs, tokens).values()
            return dict(zip(outputs, [*rest, first], strict=True))

        return gather

    with wrapped(overlay_model(), "gather_stage_outputs", rotated):
        yield


def _aux(*ids: int) -> tuple[str, object]:
    return ("aux", ids)


FAULTS = (
    Fault(
        name="aux-published-by-rank-0",
        report="TorchSpec#178",
        mechanism="TP rank 0's token shard of an aux hidden state goes on as if it were all",
        apply=published_by_rank_0,
        shows=("tep2pp2", "tep4pp2"),
        hides=("tep2", "tep1"),
        kinds=("rows lost", "wrong shape"),
        at=("stage.0.send.aux_hidden_states_0",),
        needs=(MEGA, _aux(1)),
    ),
    Fault(
        name="aux-of-the-last-stage-sharded",
        report="TorchSpec#178, on the last stage",
        mechanism="the last stage gathers its output, and not its own aux hidden states",
        apply=last_stage_leaves_shards,
        shows=("tep2", "tep2pp2", "tep4"),
        hides=("tep1",),
        kinds=("gather missing",),
        at=("aux.2",),
        needs=(MEGA, _aux(2), ("seq_lens", (8,))),
    ),
    Fault(
        name="aux-gathered-again",
        report="S1-3: received aux hidden states are full already",
        mechanism="the last stage gathers also the aux hidden states that it received whole",
        apply=received_gathered_again,
        shows=("tep2pp2", "tep4pp2"),
        hides=("tep2", "tep1"),
        kinds=("rows duplicated", "counted too often", "wrong shape"),
        at=("aux.1",),
        needs=(MEGA, _aux(1)),
    ),
    Fault(
        name="aux-sharded-on-entry",
        report="S1-3: received aux hidden states stay full",
        mechanism="a stage shards what it received, also the aux hidden states that only pass",
        apply=received_sharded_and_left,
        shows=("tep2pp2", "tep4pp2"),
        hides=("tep2", "tep1"),
        kinds=("gather missing",),
        at=("aux.1",),
        needs=(MEGA, _aux(1), ("seq_lens", (8,))),
    ),
    Fault(
        name="aux-unpacked-out-of-order",
        report="found in design: S1-3 packs three tensors into one exchange",
        mechanism="what is packed for one gather is unpacked from the second part on",
        apply=unpacked_from_the_second,
        shows=("tep2pp2", "tep4pp2"),
        hides=("tep2", "tep1"),
        kinds=("stale",),
        at=("stage.0.send.",),
        needs=(MEGA, _aux(1)),
    ),
)
