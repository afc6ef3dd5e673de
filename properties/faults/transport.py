"""How stages and ranks meet: messages that match others, buffers reused in flight, the wrong group
or root, ranks that do not come (class D, the runtime's side)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from properties.faults.fault import Fault
from properties.faults.patches import (
    Method,
    coordinator,
    minimax_m3,
    tp_rank,
    tp_size,
    wrapped,
)

STREAM = ("hidden_states", "residual")
AUX = "aux_hidden_states_"


@contextmanager
def aux_cross_matches() -> Iterator[None]:
    """Aux hidden states travel in a transfer of their own, without a tag. A stage that has some to
    pass on sends them first, as soon as it can; the receiver takes the first for the stream."""

    def two_transfers(own: Method) -> Method:
        def send(self: Any, tensors: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            stream = {name: tensors[name] for name in STREAM}
            aux = {name: value for name, value in tensors.items() if name not in STREAM}
            early = not self.is_first_rank and bool(aux)
            for part in (aux, stream) if early else (stream, aux):
                own(self, part, *args, **kwargs)

        return send

    def by_order(own: Method) -> Method:
        def receive(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            first, second = (own(self, *args, **kwargs) for _ in range(2))
            stream = dict(zip(STREAM, first.values(), strict=False))
            aux = {f"{AUX}{i}": value for i, value in enumerate(second.values())}
            return {**stream, **aux}

        return receive

    with (
        wrapped(coordinator(), "send_tensor_dict", two_transfers),
        wrapped(coordinator(), "recv_tensor_dict", by_order),
    ):
        yield


@contextmanager
def buffer_reused_in_flight() -> Iterator[None]:
    """A stage starts to send, writes its next step's values into the buffers, and then waits."""

    def reusing(own: Method) -> Method:
        def send(self: Any, tensors: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            handles = self.isend_tensor_dict(tensors, *args, **kwargs)
            for value in tensors.values():
                value.add_(1)
            for handle in handles:
                handle.wait()

        return send

    with wrapped(coordinator(), "send_tensor_dict", reusing):
        yield


@contextmanager
def slices_gathered_over_pp() -> Iterator[None]:
    """The receivers gather the slices of a tensor over their PP group, not over the TP group."""

    def wrong(own: Method) -> Method:
        return lambda self, all_gather_group: own(self, all_gather_group=self)

    with wrapped(coordinator(), "recv_tensor_dict", wrong):
        yield


@contextmanager
def broadcast_from_the_wrong_rank() -> Iterator[None]:
    """TP rank 0 receives for all and the others get it by broadcast, but from the last rank."""

    def spread(own: Method) -> Method:
        def receive(self: Any, all_gather_group: Any) -> dict[str, Any]:
            received = own(self, all_gather_group=all_gather_group)
            group = all_gather_group
            for value in received.values():
                if group.rank_in_group != 0:
                    value.zero_()
                group.broadcast(value, src=group.world_size - 1)
            return dict(received)

        return receive

    with wrapped(coordinator(), "recv_tensor_dict", spread):
        yield


@contextmanager
def one_rank_skips_the_barrier() -> Iterator[None]:
    """All ranks but TP rank 1 wait for each other before a step."""

    def waiting(own: Method) -> Method:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm.distributed import get_tp_group

            if tp_size() > 1 and tp_rank() != 1:
                get_tp_group().barrier()
            return own(self, *args, **kwargs)

        return forward

    with wrapped(minimax_m3().MiniMaxM3Model, "forward", waiting):
        yield


@contextmanager
def logits_gathered_in_reverse() -> Iterator[None]:
    """The head's gather puts the vocabulary shards in the reverse order of the ranks."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def turned(own: Method) -> Method:
        def gather(self: Any, logits: torch.Tensor) -> torch.Tensor:
            shards = own(self, logits).chunk(tp_size(), dim=-1)
            return torch.cat(shards[::-1], dim=-1)

        return gather

    with wrapped(LogitsProcessor, "_gather_logits", turned):
        yield


@contextmanager
def logits_not_gathered() -> Iterator[None]:
    """Every rank takes its shard of the vocabulary for all of it."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    with wrapped(LogitsProcessor, "_gather_logits", lambda own: lambda self, logits: logits):
        yield


FAULTS = (
    Fault(
        name="aux-transfer-cross-matches",
        report="vllm#50514",
        mechanism="a second, untagged transfer of aux hidden states is taken for the stream",
        apply=aux_cross_matches,
        shows=("pp3", "tp2pp3"),
        hides=("pp2", "tp2pp2"),
        kinds=("stale",),
        at=("stage.2.recv.",),
        needs=(("layers", "dmd"), ("aux", (1, 2))),
    ),
    Fault(
        name="send-buffer-reused",
        report="found in design",
        mechanism="a stage overwrites what it sends before the transport has taken it",
        apply=buffer_reused_in_flight,
        shows=("pp2", "tp2pp2"),
        hides=("tp1", "tp2"),
        kinds=("buffer_reuse",),
        at=("send",),
        needs=(("late", True),),
    ),
    Fault(
        name="slices-gathered-over-pp",
        report="found in design",
        mechanism="the slices of a stage's output are gathered over PP instead of over TP",
        apply=slices_gathered_over_pp,
        shows=("tp2pp2", "tp4pp2"),
        hides=("tp2",),
        kinds=("deadlock", "mismatch", "wrong group"),
        at=("pp[", "pp.cpu["),
    ),
    Fault(
        name="broadcast-from-the-wrong-rank",
        report="Megatron-LM#7452, on the TP axis",
        mechanism="what TP rank 0 has received is broadcast from another rank, which has nothing",
        apply=broadcast_from_the_wrong_rank,
        shows=("tp2pp2", "tp4pp2"),
        hides=("pp2", "tp2"),
        kinds=("rows lost",),
        at=("stage.1.recv.hidden_states",),
    ),
    Fault(
        name="rank-skips-the-barrier",
        report="vllm#43547, for a barrier",
        mechanism="one rank goes past a barrier that the others wait at",
        apply=one_rank_skips_the_barrier,
        shows=("tp2", "tp4", "tp2pp2"),
        hides=("tp1", "pp2"),
        kinds=("deadlock",),
        at=("barrier",),
    ),
    Fault(
        name="logits-gathered-in-reverse",
        report="found in design",
        mechanism="the vocabulary shards of the logits are gathered in the wrong order",
        apply=logits_gathered_in_reverse,
        shows=("tp2", "tp4", "tp2pp2"),
        hides=("tp1", "pp2"),
        kinds=("features swapped",),
        at=("logits",),
    ),
    Fault(
        name="logits-left-sharded",
        report="found in design",
        mechanism="each rank takes its shard of the vocabulary for all of it",
        apply=logits_not_gathered,
        shows=("tp2", "tp4", "tp2pp2"),
        hides=("tp1", "pp2"),
        kinds=("gather missing",),
        at=("logits",),
    ),
)
