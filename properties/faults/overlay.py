"""Single pieces of sequence parallelism across stages, undone.

| piece | undone | to be seen |
|---|---|---|
| S1-1 | sequence parallelism at PP > 1 | the stream is replicated where Shard(tokens) is expected |
| S1-2 | the residual's share of the shard on entry | a stage adds residual rows of other tokens |
| S1-3 | the gather of the aux hidden states on exit | aux of an earlier stage lack rows |
| S1-4 | reduce_results=False of the dense MLP | its output is summed twice |
| S1-5 | stage outputs equal on all TP ranks | they are not replicated at the stage boundary |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from properties.faults.fault import Fault
from properties.faults.patches import MEGA


@contextmanager
def sequence_parallel_at_one_stage_only() -> Iterator[None]:
    """S1-1: as before the change, sequence parallelism asks for PP = 1."""
    from model.overlay import config

    decide = config.use_sequence_parallel

    def as_before(vllm_config: Any) -> bool:
        return vllm_config.parallel_config.pipeline_parallel_size == 1 and decide(vllm_config)

    with patch.object(config, "use_sequence_parallel", as_before):
        yield


@contextmanager
def residual_of_the_first_rows() -> Iterator[None]:
    """S1-2: only hidden_states is sharded on entry.

    The residual is then longer than hidden_states; a kernel that goes by the rows of its first
    operand takes the residual's first rows, on every rank.
    """
    from model.overlay.model import MiniMaxM3Model

    shard = MiniMaxM3Model.shard_on_entry

    def undone(self: Any, received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sharded = shard(self, received)
        rows = sharded["hidden_states"].shape[0]
        residual = received["residual"]
        padded = torch.nn.functional.pad(residual, (0, 0, 0, max(0, rows - residual.shape[0])))
        return {**sharded, "residual": padded[:rows].clone()}

    with patch.object(MiniMaxM3Model, "shard_on_entry", undone):
        yield


@contextmanager
def residual_left_whole() -> Iterator[None]:
    """S1-2, where the norm compares the shapes of its operands: the rank fails there."""
    from model.overlay.model import MiniMaxM3Model

    shard = MiniMaxM3Model.shard_on_entry

    def undone(self: Any, received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**shard(self, received), "residual": received["residual"]}

    with patch.object(MiniMaxM3Model, "shard_on_entry", undone):
        yield


@contextmanager
def aux_left_sharded() -> Iterator[None]:
    """S1-3: only the stream is gathered on exit; aux hidden states go on as shards."""
    from model.overlay.model import MiniMaxM3Model

    gather = MiniMaxM3Model.gather_stage_outputs

    def undone(
        self: Any, outputs: Mapping[str, torch.Tensor], num_tokens: int
    ) -> dict[str, torch.Tensor]:
        stream = {name: outputs[name] for name in ("hidden_states", "residual")}
        return {**outputs, **gather(self, stream, num_tokens)}

    with patch.object(MiniMaxM3Model, "gather_stage_outputs", undone):
        yield


@contextmanager
def outputs_left_sharded() -> Iterator[None]:
    """S1-3, whole: nothing is gathered on exit, so the next stage lacks rows and fails."""
    from model.overlay.model import MiniMaxM3Model

    def undone(
        self: Any, outputs: Mapping[str, torch.Tensor], num_tokens: int
    ) -> dict[str, torch.Tensor]:
        return dict(outputs)

    with patch.object(MiniMaxM3Model, "gather_stage_outputs", undone):
        yield


@contextmanager
def outputs_left_padded() -> Iterator[None]:
    """S1-3, in part: the gather on exit is not trimmed. Seen where TP does not divide T."""
    from model.overlay.model import MiniMaxM3Model

    gather = MiniMaxM3Model.gather_stage_outputs

    def undone(
        self: Any, outputs: Mapping[str, torch.Tensor], num_tokens: int
    ) -> dict[str, torch.Tensor]:
        from vllm.distributed import get_tensor_model_parallel_world_size as tp_size

        return gather(self, outputs, outputs["residual"].shape[0] * tp_size())

    with patch.object(MiniMaxM3Model, "gather_stage_outputs", undone):
        yield


@contextmanager
def local_aux_first() -> Iterator[None]:
    """S1-3, in part: the last stage puts its own aux hidden states before the received ones."""
    from model.overlay.model import MiniMaxM3Model

    def undone(
        self: Any, remote: list[torch.Tensor], local: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        return local + remote

    with patch.object(MiniMaxM3Model, "merge_aux", undone):
        yield


@contextmanager
def dense_mlp_all_reduces() -> Iterator[None]:
    """S1-4: the dense MLP's down_proj reduces if its layer asks, as it does at PP > 1."""
    import vllm.models.minimax_m3.nvidia.model as minimax_m3

    from model.overlay.layers import MiniMaxM3SequenceParallelMLP

    own = minimax_m3.MiniMaxM3MLP.__init__

    def undone(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)

    with patch.object(MiniMaxM3SequenceParallelMLP, "__init__", undone):
        yield


@contextmanager
def outputs_differ_by_rank() -> Iterator[None]:
    """S1-5: stage outputs have all rows, but each rank knows only its own; the rest is zero.

    Where TP divides T the transport happens to send exactly the rows that a rank knows, so that
    the next stage is right: only a comparison of the ranks sees it.
    """
    from model.overlay.model import MiniMaxM3Model

    def undone(
        self: Any, outputs: Mapping[str, torch.Tensor], num_tokens: int
    ) -> dict[str, torch.Tensor]:
        from vllm.distributed import get_tensor_model_parallel_rank as tp_rank
        from vllm.distributed import get_tensor_model_parallel_world_size as tp_size

        def alone(shard: torch.Tensor) -> torch.Tensor:
            rows = shard.new_zeros(tp_size(), *shard.shape)
            rows[tp_rank()] = shard
            return rows.flatten(0, 1)[:num_tokens]

        return {name: alone(shard) for name, shard in outputs.items()}

    with patch.object(MiniMaxM3Model, "gather_stage_outputs", undone):
        yield


AUX = ("aux", (1, 2))


def _undone(
    name: str,
    piece: str,
    mechanism: str,
    apply: Callable[[], AbstractContextManager[None]],
    *,
    kinds: tuple[str, ...],
    at: tuple[str, ...],
    shows: tuple[str, ...] = ("tep2pp2", "tep4pp2", "tep2pp4"),
    aux: bool = False,
) -> Fault:
    return Fault(
        name=name,
        report=piece,
        mechanism=mechanism,
        apply=apply,
        shows=shows,
        hides=("tep2",),
        kinds=kinds,
        at=at,
        needs=(MEGA, AUX) if aux else (MEGA,),
    )


FAULTS = (
    _undone(
        "sp-at-one-stage-only",
        "S1-1",
        "sequence parallelism is on at one pipeline stage only",
        sequence_parallel_at_one_stage_only,
        kinds=("sequence parallelism",),
        at=("layers.0",),
    ),
    _undone(
        "entry-keeps-residual",
        "S1-2",
        "a stage shards the hidden states it receives, and takes the residual's first rows",
        residual_of_the_first_rows,
        kinds=("rows mixed",),
        at=(".stream", ".residual"),
    ),
    _undone(
        "entry-leaves-residual-whole",
        "S1-2, where the norm compares shapes",
        "a stage shards the hidden states it receives, and not the residual",
        residual_left_whole,
        kinds=("rank_failed",),
        at=("model.py",),
    ),
    _undone(
        "exit-leaves-aux-sharded",
        "S1-3",
        "a stage gathers its stream on exit, and not its aux hidden states",
        aux_left_sharded,
        kinds=("gather missing",),
        at=("stage.0.send.aux_hidden_states_0",),
        aux=True,
    ),
    _undone(
        "exit-leaves-all-sharded",
        "S1-3, whole",
        "a stage gathers nothing on exit",
        outputs_left_sharded,
        kinds=("gather missing", "rank_failed"),
        at=("stage.0.send",),
    ),
    _undone(
        "exit-leaves-padding",
        "S1-3, in part",
        "a stage does not trim the padding rows off what it gathered on exit",
        outputs_left_padded,
        kinds=("padding leaked", "wrong shape"),
        at=("stage.0.send",),
    ),
    _undone(
        "aux-local-first",
        "S1-3, in part",
        "the last stage puts its own aux hidden states before those of earlier stages",
        local_aux_first,
        kinds=("stale",),
        at=("aux.",),
        # Of four stages the last one has captured neither of the two.
        shows=("tep2pp2", "tep4pp2"),
        aux=True,
    ),
    _undone(
        "dense-mlp-all-reduces",
        "S1-4",
        "the dense MLP all-reduces what it reduce-scatters afterwards: the double reduce",
        dense_mlp_all_reduces,
        kinds=("counted too often",),
        at=(".ffn",),
    ),
    _undone(
        "exit-differs-by-rank",
        "S1-5",
        "stage outputs have all rows, but each TP rank knows only its own",
        outputs_differ_by_rank,
        kinds=("rows lost", "ranks differ"),
        at=("stage.0.send",),
    ),
)
