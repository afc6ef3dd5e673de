"""Builds the subject on a folded world with its loading traced, right or with a fault put in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from model.checkpoint import checkpoint
from model.megamoe.tiny import MegaTinyM3, quantise_experts
from model.provenance import Loaded, Numbering
from model.rank_state import RANK_LOCAL
from model.subject import Subject
from model.tiny import TinyM3
from properties import Verdict
from properties.parameters import Layout, loaded_once
from sim import Topology, World

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to load."""

    word: str
    tiny: TinyM3 = field(default_factory=lambda: TinyM3(layers="dm"))
    dtype: torch.dtype = torch.float32
    quantised: bool = False
    sp: bool = True

    @property
    def mega(self) -> bool:
        return isinstance(self.tiny, MegaTinyM3)


@cache
def weights_of(case: Case) -> dict[str, torch.Tensor]:
    weights = checkpoint(case.tiny, 0, case.dtype)
    return quantise_experts(weights) if case.quantised else weights


@cache
def numbering_of(case: Case) -> Numbering:
    return Numbering.of(weights_of(case))


def layout_of(case: Case) -> Layout:
    return Layout(
        topology=Topology.parse(case.word),
        kv_heads=case.tiny.num_key_value_heads,
        whole_shared_experts=case.mega,
    )


def load(case: Case) -> list[Loaded]:
    """What each rank has loaded."""
    weights, numbering = weights_of(case), numbering_of(case)
    backend = "deep_gemm_mega_moe" if case.mega else "auto"

    def program(ctx: Any) -> Loaded | None:
        return Subject(
            ctx,
            case.tiny,
            weights,
            case.dtype,
            moe_backend=backend,
            sequence_parallel=case.sp,
            numbering=numbering,
        ).loaded

    with World(case.word, rank_local=RANK_LOCAL) as world:
        return world.run(program)


def judge(case: Case) -> Verdict:
    """Load, and judge."""
    return loaded_once(layout_of(case), numbering_of(case), load(case))


def feed(patch: pytest.MonkeyPatch, change: Callable[[Any, Weights], Weights]) -> None:
    """Have vLLM's model loader see `change(model, weights)` instead of the weights."""
    import vllm.models.minimax_m3.nvidia.model as m3

    original = m3.MiniMaxM3Model.load_weights

    def changed(self: Any, weights: Weights) -> Any:
        return original(self, change(self, weights))

    patch.setattr(m3.MiniMaxM3Model, "load_weights", changed)


def renamed(**names: str) -> Callable[[Any, Weights], Iterator[tuple[str, torch.Tensor]]]:
    """A change that lets tensors pass under other names; "_" stands for "."."""

    def change(_model: Any, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            yield next((name.replace(a, b) for a, b in names.items() if a in name), name), weight

    return change
