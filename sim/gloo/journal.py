"""A rank's journal: every operation it starts, written before it is carried out.

The journal is a file that has no name, so nothing of it can be left behind; what was written is
there for the calling process also after the rank was killed. Writing wakes nobody, so a step pays
a few microseconds for each operation.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..calls import Buckets, Call, dtype_name
from ..callsite import Frame, Site
from ..fabric import Group
from ..mailbox import Post
from ..reduction import Reduction

Shapes = tuple[tuple[tuple[tuple[int, ...], str], ...], ...]
"""Shape and dtype of each tensor of each bucket."""


@dataclass(frozen=True)
class GroupNote:
    """A group that the records below speak of by its number."""

    number: int
    name: str
    label: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class CallNote:
    """A collective was called."""

    group: int
    index: int
    op: str
    sequence: int
    inputs: Shapes
    outputs: Shapes
    reduction: Reduction | None
    root: int | None
    splits: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    blocking: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class PostNote:
    """A send or a receive was posted."""

    group: int
    op: str
    source: int | None
    destination: int
    tag: int
    shape: tuple[int, ...]
    dtype: str
    peer: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Waits:
    """The rank waits for its operation of this number (0 is the first of the run)."""

    operation: int


@dataclass(frozen=True)
class Done:
    """The rank has seen this operation complete."""

    operation: int


Note = GroupNote | CallNote | PostNote | Waits | Done


class ToldSite(Site):
    """A call site in another process: its lines without their code."""

    __slots__ = ()

    def __init__(self, frames: tuple[Frame, ...]) -> None:
        super().__init__(())
        self._frames = frames

    def __str__(self) -> str:
        return str(self.frames[0]) if self.frames else ""


class Journal:
    """The writing end, in the rank."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._groups: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._count = 0

    def begin(self) -> None:
        """A run starts; the reader has emptied the file."""
        self._groups.clear()
        self._count = 0

    def call(self, group: Group, index: int, call: Call) -> int:
        """Note a collective; returns its number."""
        return self._operation(
            CallNote(
                self._group(group),
                index,
                call.op,
                call.sequence,
                _shapes(call.inputs),
                _shapes(call.outputs),
                call.reduction,
                call.root,
                (call.in_splits, call.out_splits),
                call.blocking,
                call.site.frames,
            )
        )

    def post(self, group: Group, post: Post) -> int:
        """Note a send or a receive; returns its number."""
        return self._operation(
            PostNote(
                self._group(group),
                post.op,
                post.source,
                post.destination,
                post.tag,
                tuple(post.tensor.shape),
                dtype_name(post.tensor.dtype),
                post.peer,
                post.site.frames,
            )
        )

    def waits(self, operation: int) -> None:
        """The rank is about to wait for an operation."""
        self._write(Waits(operation))

    def done(self, operation: int) -> None:
        """The rank has seen an operation complete."""
        self._write(Done(operation))

    def _operation(self, note: Note) -> int:
        self._write(note)
        self._count += 1
        return self._count - 1

    def _group(self, group: Group) -> int:
        key = (group.name, group.label, group.ranks)
        number = self._groups.get(key)
        if number is None:
            number = self._groups[key] = len(self._groups)
            self._write(GroupNote(number, *key))
        return number

    def _write(self, note: Note) -> None:
        os.write(self._descriptor, pickle.dumps(note, pickle.HIGHEST_PROTOCOL))


class Reader:
    """The reading end, in the calling process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._at = 0

    def clear(self) -> None:
        """Empty the journal. Only while the rank runs no program."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)  # the rank's place in the file, too: it is one
        self._at = 0

    @property
    def whole(self) -> bool:
        """Whether everything that is in the file has been read."""
        return self._at == os.fstat(self._descriptor).st_size

    def news(self) -> Iterator[Note]:
        """What was noted since the last look."""
        size = os.fstat(self._descriptor).st_size
        data = b""
        while self._at + len(data) < size:
            more = os.pread(self._descriptor, size - self._at - len(data), self._at + len(data))
            if not more:
                break
            data += more
        stream = io.BytesIO(data)
        while stream.tell() < len(data):
            start = stream.tell()
            try:
                note = pickle.load(stream)
            except (EOFError, pickle.UnpicklingError):
                # A rank that was killed wrote half a note, or another half is on its way.
                self._at += start
                return
            yield note
        self._at += len(data)


def _shapes(buckets: Buckets) -> Shapes:
    return tuple([tuple([(tuple(t.shape), dtype_name(t.dtype)) for t in b]) for b in buckets])


def as_buckets(shapes: Shapes) -> Buckets:
    """Tensors of these shapes and dtypes that hold no data."""
    return [[as_tensor(*each) for each in bucket] for bucket in shapes]


def as_tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor of this shape and dtype that holds no data."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
