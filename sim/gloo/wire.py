"""What travels between the calling process and the ranks: pickles, with tensors as plain bytes.

A tensor of another device arrives on the CPU: the calling process may have no such device.

torch's own pickling of a tensor writes an archive, at a hundred times the cost of its bytes.
"""

from __future__ import annotations

import io
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from ..calls import dtype_name


@dataclass(frozen=True, kw_only=True)
class Raised:
    """A rank's program raised."""

    said: str
    """Type, message and line, in one line."""
    trace: str
    error: BaseException | None
    """The exception itself, where it can be pickled."""


def dump(message: object) -> bytes:
    """Pickle a message. Functions go by name, so they are top-level ones of a module.

    Raises:
        Exception: it cannot be pickled; whatever pickle raises.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """The message of these bytes."""
    return pickle.loads(data)


def raised(error: BaseException, said: str) -> Raised:
    """Tell of an exception; without the exception itself if it cannot travel."""
    trace = "".join(traceback.format_exception(error))
    try:
        load(dump(error))
    except Exception:
        return Raised(said=said, trace=trace, error=None)
    return Raised(said=said, trace=trace, error=error)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.is_sparse or value.is_meta:
            return NotImplemented
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, dtype_name(value.dtype), tuple(value.shape), value.requires_grad)


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if not data:
        return torch.zeros(shape, dtype=kind, requires_grad=requires_grad)
    # A bytearray, because a tensor over bytes could not be written to.
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.view(kind).reshape(shape).requires_grad_(requires_grad)
