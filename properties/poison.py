"""Nothing that was never written, and no pad row, reaches the row of a token.

Under `poisoned`, memory that torch hands out uninitialised holds NaN (integers hold their largest
value), and rows that are added at the end of an activation to make its length divide hold NaN
instead of zero. NaN survives a product with zero, so a mask that multiplies does not hide it; code
that drops what it must not read, by a selection or a trim, gives the same bits as ever.

Nothing in vLLM's MiniMax-M3 and in the stand-ins for its kernels reads such memory and masks it
afterwards, as the tests show; so there is no list of exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from properties.captured import Captured
from properties.placement import Placement, shard_rows
from properties.verdict import Verdict
from sim import Topology

_NAME = "poison"


_FACTORIES = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
"""What hands out uninitialised memory to Python. What an operator of torch allocates for itself it
also fills; torch's own `fill_uninitialized_memory` fills that too, which costs more, finds no more,
and asks for other kernels than those that run without it."""


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, uninitialised memory and pad rows are NaN, on all threads of the process.

    Enter it on the main thread, around whole runs of a world: it replaces functions of torch.
    """
    with ExitStack() as stack:
        for holder, name in _FACTORIES:
            _replace(stack, holder, name, _filled(getattr(holder, name)))
        pad = torch.nn.functional.pad
        _replace(stack, torch.nn.functional, "pad", _poisoned_pad(pad))
        yield


def _replace(stack: ExitStack, holder: Any, name: str, instead: Callable[..., Any]) -> None:
    """Set a name until the stack unwinds; one that was inherited is inherited again."""
    own = name in vars(holder)
    before = getattr(holder, name)
    setattr(holder, name, instead)
    stack.callback(setattr, holder, name, before) if own else stack.callback(delattr, holder, name)


def _filled(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = factory(*args, **kwargs)
        if not made.numel():
            return made
        if made.is_floating_point() or made.is_complex():
            (made.detach() if made.requires_grad else made).fill_(torch.nan)
        elif made.dtype != torch.bool:
            made.fill_(torch.iinfo(made.dtype).max)
        return made

    return filled


def _poisoned_pad(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned_pad(
        input: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None
    ) -> torch.Tensor:
        padded = original(input, list(pad), mode, value)
        if mode == "constant" and not value and _adds_rows_only(input, pad):
            padded[input.shape[0] :] = torch.nan
        return padded

    return poisoned_pad


def _adds_rows_only(input: torch.Tensor, pad: Sequence[int]) -> bool:
    """Whether padding adds rows at the end of the first of several dims, and nothing else."""
    *others, after = pad
    rows = len(pad) == 2 * input.dim() and after > 0 and not any(others)
    return rows and input.dim() > 1 and input.is_floating_point()


def no_poison(
    topology: Topology,
    tokens: int,
    captured: Sequence[Mapping[str, Captured]],
    plain: Sequence[Mapping[str, Captured]] | None = None,
) -> Verdict:
    """Judge a step that ran under `poisoned`.

    Args:
        topology: the ranks' layout.
        tokens: of the batch.
        captured: each rank's taps, by rank, in program order.
        plain: the taps of the same step without poison, if there was one. Real rows then have to
            have the same values; without it they must not be NaN.
    """
    names = list(dict.fromkeys(name for taps in captured for name in taps))
    for position, name in enumerate(names):
        bad: dict[int, list[int]] = {}
        for rank, taps in enumerate(captured):
            if name not in taps:
                continue
            before = None if plain is None else plain[rank].get(name)
            if _clean(taps[name].value, None if before is None else before.value):
                continue
            value, rows = _real_rows(topology, rank, taps[name], tokens)
            was = None if before is None else _real_rows(topology, rank, before, tokens)[0]
            wrong = _poisoned_rows(value, was)
            if wrong:
                bad[rank] = [row + rows for row in wrong]
        if bad:
            return _fails(name, names[position - 1] if position else "", bad, tokens)
    return Verdict(
        name=_NAME,
        ok=True,
        what=f"no pad row and no uninitialised memory reached a token at {len(names)} taps",
    )


def _clean(value: torch.Tensor, before: torch.Tensor | None) -> bool:
    """Whether there is nothing to look at row by row; most taps are so, and this is quick."""
    if before is not None:
        return torch.equal(value, before)
    return not (value.is_floating_point() and bool(value.isnan().any()))


def _real_rows(
    topology: Topology, rank: int, tap: Captured, tokens: int
) -> tuple[torch.Tensor, int]:
    """The rows of tokens in a rank's value, and the token of the first."""
    placement = Placement.parse(tap.declared)
    if placement.kind != "shard":
        return tap.value[:tokens], 0
    start = placement.first_row(topology, rank, tokens)
    rows = shard_rows(tokens, len(topology.group_of(rank, placement.axis)))
    return tap.value[: max(0, min(rows, tokens - start))], start


def _poisoned_rows(value: torch.Tensor, before: torch.Tensor | None) -> list[int]:
    if before is not None and before.shape != value.shape:
        return list(range(value.shape[0]))
    if not value.numel():
        return []
    flat = value.reshape(value.shape[0], -1)
    if before is None:
        return _where(flat.isnan()) if value.is_floating_point() else []
    was = before.reshape(before.shape[0], -1)
    differs = flat != was
    if value.is_floating_point():
        # NaN in both is no poison: it was there without.
        differs &= ~(flat.isnan() & was.isnan())
    return _where(differs)


def _where(wrong: torch.Tensor) -> list[int]:
    return [int(row) for row in wrong.any(dim=-1).nonzero().flatten()]


def _fails(name: str, clean: str, bad: Mapping[int, list[int]], tokens: int) -> Verdict:
    rows = sorted({row for of_rank in bad.values() for row in of_rank})
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    since = f"after {clean}" if clean else "before the first tap"
    return Verdict(
        name=_NAME,
        ok=False,
        what=f"{name} has read a pad row or memory that was never written",
        where=f"{name}, ranks {sorted(bad)}, rows {shown} of {tokens}",
        why=f"the poison put there came into rows of tokens {since}: a pad row that is not cut "
        "off or masked, or a buffer or slot of a KV cache that was read before it was filled",
        kind="poison",
        at=name,
    )
