"""Sliced sends: each of n ranks sends one of n slices of a tensor of its own, to be gathered again.

That is how pipeline stages save traffic, and right only if the tensor is the same on all senders.
Of shards, the receivers put together slices of different things (vLLM issue 24021). What proves
it, all of it together:
- member j of an all-gather gives exactly what it received, from n different senders, and that was
  slice j of n in its sender's memory, the only slice of it that was sent;
- each sender's slices were all written at once: nothing wrote to the tensor in part, as a rank
  does that fills its own slice of a buffer. Tensors of inference mode keep no count of writes, so
  nothing is said of them;
- each slice that was not sent is unlike the one that its neighbour sent in its place, by more
  than rounding.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from properties.sanitizer import bits, differ
from sim.calls import Call
from sim.mailbox import Post

_SAMPLES = 64
"""Elements kept of each slice."""
_MOST_SLICES = 256
_MOST = 4096
"""Messages remembered; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What is known of a sent slice."""

    rank: int
    """The sender's global rank."""
    index: int
    """Which slice of its storage it is."""
    slices: torch.Tensor
    """Samples of each slice of the storage, [slices, samples]."""
    memory: tuple[int, int, int]
    """Address, size of a slice in elements, and number of writes."""
    site: str


def slice_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Which slice a tensor is of how many equal ones that its storage is made of, if it is one of
    two or more."""
    if tensor.layout is not torch.strided or not tensor.numel() or not tensor.is_contiguous():
        return None
    size, total = tensor.numel(), tensor.untyped_storage().nbytes() // tensor.itemsize
    if total == size or total % size or tensor.storage_offset() % size:
        return None
    return tensor.storage_offset() // size, total // size


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage of a tensor, as a view [elements]."""
    total = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((total,), (1,), 0)


class Writes:
    """Which tensors hold only what was written to all of them at once."""

    def __init__(self) -> None:
        self._written: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def transport_writes(self, tensor: torch.Tensor) -> None:
        """The transport is about to write to a tensor, once."""
        if tensor.is_inference():
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes:
            return
        key = storage.data_ptr()
        gone = weakref.ref(tensor, lambda _: self._written.pop(key, None))
        self._written[key] = (gone, tensor._version + 1)

    def at_once(self, tensor: torch.Tensor) -> bool:
        """Whether nothing has written to the tensor's storage in part."""
        if tensor.is_inference():
            return False
        if tensor._version == 0:
            return True
        alive, version = self._written.get(tensor.untyped_storage().data_ptr(), (lambda: None, -1))
        return alive() is not None and tensor._version == version


class SlicedSends:
    """Remembers sent slices, by samples alone, until they are gathered."""

    def __init__(self) -> None:
        self.writes = Writes()
        self._received: OrderedDict[tuple[int, bytes], Sent] = OrderedDict()
        self._indices: defaultdict[tuple[int, tuple[int, int, int]], set[int]] = defaultdict(set)

    def collective(self, calls: Sequence[Call]) -> None:
        """A collective, before its outputs are written."""
        for call in calls:
            for output in (t for bucket in call.written() for t in bucket):
                # In place, what was not written at once before is not so afterwards.
                in_place = any(t is output for bucket in call.inputs for t in bucket)
                if not in_place or self.writes.at_once(output):
                    self.writes.transport_writes(output)

    def message(self, send: Post, recv: Post) -> None:
        """A message, before it is written at the receiver."""
        payload, original = send.tensor, send.original
        if recv.tensor.is_floating_point():
            self.writes.transport_writes(recv.tensor)
        if original is None or not payload.is_floating_point():
            return
        place = slice_of(original)
        if place is None or place[1] > _MOST_SLICES or not self.writes.at_once(original):
            return
        # The sender may have used its buffer again.
        if not bits.telling([payload]) or not bits.equal([payload], [original]):
            return
        index, count = place
        slices = storage_of(original).reshape(count, -1)
        memory = (original.untyped_storage().data_ptr(), slices.shape[1], original._version)
        self._indices[send.rank, memory].add(index)
        if not all(bits.telling([one]) for one in slices):
            return
        step = max(1, slices.shape[1] // _SAMPLES)
        sent = Sent(
            rank=send.rank,
            index=index,
            slices=slices[:, ::step].clone(),
            memory=memory,
            site=str(send.site),
        )
        key = (recv.rank, bits.digest([payload]))
        self._received[key] = sent
        self._received.move_to_end(key)
        if len(self._received) > _MOST:
            self._received.popitem(last=False)

    def gathers_shards(self, calls: Sequence[Call], by_rank: Sequence[bits.Parts]) -> str | None:
        """Where the slices were sent, if an all-gather puts together slices of different tensors.

        Args:
            calls: the all-gather.
            by_rank: its operand on each rank, in group order.
        """
        if not self._received or not by_rank[0][0].is_floating_point():
            return None
        found = []
        for call, parts in zip(calls, by_rank, strict=True):
            sent = self._received.get((call.rank, bits.digest(parts)))
            if sent is None:
                return None
            found.append(sent)
        return found[0].site if _differ(found) and self._alone(found) else None

    def _alone(self, found: Sequence[Sent]) -> bool:
        """Whether each sender sent no other slice of its tensor."""
        return all(len(self._indices[sent.rank, sent.memory]) == 1 for sent in found)


def _differ(found: Sequence[Sent]) -> bool:
    """Whether the senders cut slices in turn from tensors that differ throughout."""
    count, kind = len(found), found[0].slices
    if len({sent.rank for sent in found}) < count or len(kind) % count:
        return False
    if any(s.slices.shape != kind.shape or s.slices.dtype != kind.dtype for s in found):
        return False
    if [sent.index % count for sent in found] != [*range(count)]:
        return False
    # The larger tensor may be a part of its storage, such as a shard that is a view.
    own = [s.slices[s.index // count * count :][:count] for s in found]
    return not any(
        differ.same(own[i][j], own[j][j], count)
        for i in range(count)
        for j in range(count)
        if i != j
    )
