"""Watches values that must survive a step, and reports those that were overwritten too early.

Sharing memory is no fault, and neither is work in place: norms, activations and all-reduces do it
by contract. A fault is a value that somebody reads, or that is handed on, after its bits have
changed. So the watch keeps a copy of

- the input of an MoE block, which its router, its routed and its shared experts all read: each of
  them, where it reads the same memory, has to find the same bits;
- an aux hidden state from its capture to the end of the stage's forward pass, where it is handed
  on;
- the batch, and the weights, which the next step reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model.batch import Batch
from sim.buffers import memory, same_bits


@dataclass(frozen=True, kw_only=True)
class Overwritten:
    """A value whose bits changed before its last use."""

    value: str
    """What it is: "input of layers.1.block_sparse_moe", "aux hidden state 2"."""
    at: str
    """Who would read it: a module, "its receiver", or "the next step"."""
    by: str
    """The module in which it was written, or between which two uses."""
    rows: tuple[int, ...]
    """Rows that changed; empty for weights."""


class Survival:
    """One rank's watch. Nothing is watched, or copied, between `stop` and `start`."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Overwritten] | None = None
        self._block: _Pinned | None = None
        self._aux: list[tuple[list[torch.Tensor], int, _Pinned]] = []
        self._batch: list[_Pinned] = []
        self._weights: list[_Weight] = []

    def start(self, batch: Batch) -> None:
        """Begin a step."""
        self._found, self._block = {}, None
        self._aux.clear()
        for weight in self._weights:
            weight.changed()  # what was written between steps is no fault of this one
        self._batch = [
            _Pinned(value=f"the batch's {name}", tensor=tensor, copy=tensor.clone())
            for name, tensor in (("token ids", batch.token_ids), ("positions", batch.positions))
        ]

    def stop(self) -> tuple[Overwritten, ...]:
        """End the step: what was overwritten in it, in order."""
        if self._found is None:
            return ()
        for pinned in self._batch:
            self._judge(pinned, pinned.tensor, "the next step")
        for weight in self._weights:
            if weight.changed():
                self._report(weight.name, "the next step", "the step", ())
        found, self._found, self._block = tuple(self._found.values()), None, None
        self._aux.clear()
        return found

    def pin_block(self, name: str, hidden_states: torch.Tensor) -> None:
        """An MoE block starts with this input."""
        if self._found is not None:
            value = f"input of {name}"
            copy = torch.clone(hidden_states)
            self._block = _Pinned(value=value, tensor=hidden_states, copy=copy)

    def unpin_block(self) -> None:
        """The block is over: its input may be overwritten."""
        self._block = None

    def enter(self, part: str, hidden_states: Any) -> None:
        """A part of the block reads this."""
        if self._block is None:
            return
        if self._block.is_at(hidden_states):
            self._judge(self._block, hidden_states, part)
        self._block.inside.append(part)

    def leave(self, part: str) -> None:
        """A part of the block has run."""
        if self._block is None:
            return
        if self._block.inside and self._block.inside[-1] == part:
            self._block.inside.pop()
        if not self._block.by and not same_bits(self._block.tensor, self._block.copy):
            self._block.by = part

    def pin_aux(self, aux_id: int, captured: list[torch.Tensor]) -> None:
        """The last of `captured` is the aux hidden state of this id, just captured."""
        if self._found is not None:
            value = captured[-1]
            copy = torch.clone(value)
            pinned = _Pinned(value=f"aux hidden state {aux_id}", tensor=value, copy=copy)
            self._aux.append((captured, len(captured) - 1, pinned))

    def end_of_stage(self) -> None:
        """The stage's forward pass is over: its aux hidden states are handed on as they are now."""
        for captured, slot, pinned in self._aux:
            # The list, and not the tensor: a copy that was put there in time is right.
            self._judge(pinned, captured[slot], "its receiver")
        self._aux.clear()

    def keep_weights(self, model: nn.Module) -> None:
        """Watch the parameters of a model whose weights are loaded and processed."""
        self._weights = [_Weight(name, weight) for name, weight in model.named_parameters()]

    def _judge(self, pinned: "_Pinned", now: torch.Tensor, at: str) -> None:
        if same_bits(now, pinned.copy):
            return
        inside = pinned.inside[-1] if pinned.inside else "the stage's forward pass"
        self._report(pinned.value, at, pinned.by or inside, _changed_rows(now, pinned.copy))

    def _report(self, value: str, at: str, by: str, rows: tuple[int, ...]) -> None:
        if self._found is not None:
            found = Overwritten(value=value, at=at, by=by, rows=rows)
            self._found.setdefault((value, at), found)


class _Pinned:
    """A value with the bits that it has to keep."""

    def __init__(self, *, value: str, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        self.value, self.tensor, self.copy = value, tensor, copy
        self.by = ""
        """The part that was seen to change it."""
        self.inside: list[str] = []
        """The parts that run now, outermost first."""

    def is_at(self, other: Any) -> bool:
        """Whether `other` is the same tensor, or another view of just the same elements."""
        return isinstance(other, torch.Tensor) and (
            other.data_ptr() == self.tensor.data_ptr()
            and other.shape == self.tensor.shape
            and other.stride() == self.tensor.stride()
            and other.dtype == self.tensor.dtype
        )


class _Weight:
    """A parameter, its version, and a fingerprint that tells whether a new version differs."""

    def __init__(self, name: str, weight: torch.Tensor) -> None:
        self.name, self._weight = name, weight
        self._version, self._bits = weight._version, _fingerprint(weight)

    def changed(self) -> bool:
        """Whether the bits differ from when this was last asked; cheap where nothing wrote."""
        if self._weight._version == self._version:
            return False
        bits, self._version = _fingerprint(self._weight), self._weight._version
        changed, self._bits = bits != self._bits, bits
        return changed


def attach(model: nn.Module, watch: Survival) -> None:
    """Hook a MiniMaxM3SparseForCausalLM that is ready to run."""
    watch.keep_weights(model)
    backbone: Any = model.model
    if hasattr(backbone, "_maybe_add_hidden_state"):
        _watch_captures(backbone, watch)
        backbone.register_forward_hook(lambda *_: watch.end_of_stage())
    for i in range(backbone.start_layer, backbone.end_layer):
        layer = backbone.layers[i]
        if layer.is_moe_layer:
            _watch_block(layer.block_sparse_moe, f"layers.{i}.block_sparse_moe", watch)


def _watch_block(block: Any, name: str, watch: Survival) -> None:
    def start(_module: nn.Module, args: Any, kwargs: Any) -> None:
        watch.pin_block(name, _first(args, kwargs))

    for part in ("gate", "experts", "shared_experts"):
        module = getattr(block, part, None)
        if isinstance(module, nn.Module):
            _watch_part(module, f"{name}.{part}", watch)
    routed = getattr(block.experts, "routed_experts", None)
    if isinstance(routed, nn.Module) and hasattr(routed, "forward_modular"):
        _watch_method(routed, "forward_modular", f"{name}.experts.routed_experts", watch)
    block.register_forward_pre_hook(start, with_kwargs=True)
    block.register_forward_hook(lambda *_: watch.unpin_block())


def _watch_part(module: nn.Module, name: str, watch: Survival) -> None:
    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        watch.enter(name, _first(args, kwargs))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda *_: watch.leave(name))


def _watch_method(module: nn.Module, method: str, name: str, watch: Survival) -> None:
    """As `_watch_part`, of a method that vLLM calls past the module's own call."""
    kind = type(module)

    def watched(*args: Any, **kwargs: Any) -> Any:
        watch.enter(name, _first(args, kwargs))
        output = getattr(kind, method)(module, *args, **kwargs)
        watch.leave(name)
        return output

    setattr(module, method, watched)


def _watch_captures(backbone: Any, watch: Survival) -> None:
    kind = type(backbone)

    def watched(captured: list[torch.Tensor], layer: int, *args: Any, **kwargs: Any) -> Any:
        before = len(captured)
        output: Callable[..., Any] = kind._maybe_add_hidden_state
        result = output(backbone, captured, layer, *args, **kwargs)
        if len(captured) > before:
            watch.pin_aux(layer, captured)
        return result

    backbone._maybe_add_hidden_state = watched


def _first(args: Any, kwargs: Any) -> Any:
    """The hidden states that a module was called with."""
    if args:
        return args[0]
    return kwargs.get("hidden_states", kwargs.get("x"))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def _changed_rows(now: torch.Tensor, before: torch.Tensor) -> tuple[int, ...]:
    if now.shape != before.shape or not now.dim() or not now.numel():
        return ()
    differs = (_bytes(now) != _bytes(before)).view(now.shape[0], -1).any(dim=1)
    return tuple(differs.nonzero().flatten().tolist())


def _fingerprint(value: torch.Tensor) -> int:
    """A number that changes with any element, and with the order of elements."""
    content = memory(value.detach())
    if content is not None:
        return hash(content)
    bits = _bytes(value).to(torch.int64)
    # Odd factors keep every bit in the wrapping product.
    return int((bits * (torch.arange(bits.numel(), device=bits.device) * 2 + 1)).sum())
