"""The gather of a stream sharded by token before the head, and on exit of a stage (class C)."""

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
    tp_rank,
    tp_size,
    wrapped,
)


def _gathered(shard: torch.Tensor) -> torch.Tensor:
    """The rows of all shards, pads included."""
    from vllm.models.common.ops.sequence_parallel import sp_all_gather

    return torch.as_tensor(sp_all_gather(shard))


def _final_gather(gather: Any) -> Any:
    def gathered(self: Any, outputs: Iterable[torch.Tensor], tokens: int) -> list[torch.Tensor]:
        return [gather(shard, tokens) for shard in outputs]

    return replaced(overlay_model(), "gather_final_outputs", gathered)


@contextmanager
def final_gather_missing() -> Iterator[None]:
    """The final norm's shards go to the head as they are."""
    with _final_gather(lambda shard, tokens: shard):
        yield


@contextmanager
def final_gather_keeps_pads() -> Iterator[None]:
    """The final gather is not cut to the tokens."""
    with _final_gather(lambda shard, tokens: _gathered(shard)):
        yield


@contextmanager
def final_gather_turned_round() -> Iterator[None]:
    """The final gather puts the shards in the reverse order of the ranks."""

    def turned(shard: torch.Tensor, tokens: int) -> torch.Tensor:
        return torch.cat(_gathered(shard).chunk(tp_size())[::-1])[:tokens]

    with _final_gather(turned):
        yield


@contextmanager
def final_gather_interleaves() -> Iterator[None]:
    """The final gather takes the shards for strided ones: row r + k TP from rank r."""

    def interleaved(shard: torch.Tensor, tokens: int) -> torch.Tensor:
        rows = torch.stack(_gathered(shard).chunk(tp_size()), dim=1)
        return rows.flatten(0, 1)[:tokens]

    with _final_gather(interleaved):
        yield


@contextmanager
def shards_split_unevenly() -> Iterator[None]:
    """On exit a rank gives back only its real rows, and the gather goes by the first rank's."""

    def exact(own: Method) -> Method:
        def gather(self: Any, outputs: Mapping[str, torch.Tensor], tokens: int) -> Any:
            rows = next(iter(outputs.values())).shape[0]
            kept = max(0, min(rows, tokens - tp_rank() * rows))
            return own(self, {name: shard[:kept] for name, shard in outputs.items()}, tokens)

        return gather

    with wrapped(overlay_model(), "gather_stage_outputs", exact):
        yield


FAULTS = (
    Fault(
        name="sp-final-gather-missing",
        report="found in design",
        mechanism="the head works on shards of the final norm's output",
        apply=final_gather_missing,
        shows=("tep2", "tep4", "tep2pp2"),
        hides=("tep1",),
        kinds=("gather missing",),
        at=("logits",),
        needs=(MEGA, ("seq_lens", (8,))),
    ),
    Fault(
        name="sp-final-gather-keeps-pads",
        report="vllm#53191, at the end",
        mechanism="the final gather is not cut to the tokens, and pads get logits",
        apply=final_gather_keeps_pads,
        shows=("tep2", "tep4", "tep2pp2"),
        hides=("tep1",),
        kinds=("padding leaked", "wrong shape"),
        at=("logits",),
        needs=(MEGA,),
    ),
    Fault(
        name="sp-final-gather-turned-round",
        report="found in design",
        mechanism="the final gather puts the shards in the reverse order of the ranks",
        apply=final_gather_turned_round,
        shows=("tep2", "tep4", "tep2pp2"),
        hides=("tep1",),
        kinds=("rows swapped",),
        at=("logits",),
        needs=(MEGA, ("seq_lens", (8,))),
    ),
    Fault(
        name="sp-final-gather-interleaves",
        report="found in design",
        mechanism="contiguous shards are gathered as if they were strided",
        apply=final_gather_interleaves,
        shows=("tep2", "tep4", "tep2pp2"),
        hides=("tep1",),
        kinds=("rows swapped",),
        at=("logits",),
        needs=(MEGA, ("seq_lens", (8,))),
    ),
    Fault(
        name="sp-exit-with-uneven-shards",
        report="sglang#20834, sglang#30015",
        mechanism="the last ranks drop their pads before a gather of equal shards",
        apply=shards_split_unevenly,
        shows=("tep2pp2", "tep4pp2"),
        hides=("tep2", "tep1"),
        kinds=("mismatch",),
        at=("all_gather",),
        needs=(MEGA,),
    ),
)
