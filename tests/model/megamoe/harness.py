"""Folded worlds in which vLLM's MegaMoE experts, or the block around them, run on given tokens."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.megamoe import mxfp8
from model.megamoe.tiny import MegaTinyM3
from model.rank_state import RANK_LOCAL
from model.subject import vllm_config
from sim import Ledger, RankContext, World, label_group
from tests.model.megamoe import dense

TINY = MegaTinyM3(layers="m")
EXPERTS, TOP_K = TINY.num_local_experts, TINY.num_experts_per_tok
HIDDEN, WIDTH = TINY.hidden_size, TINY.intermediate_size
TABLE = RANK_LOCAL
SHARDS = ("w1", "w2", "w3")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """What one rank brings to a launch."""

    x: Tensor
    """bfloat16 [n, H]"""
    ids: Tensor
    """int64 [n, K]"""
    weights: Tensor
    """float32 [n, K], positive, of sum 2"""

    @classmethod
    def random(cls, count: int, seed: int) -> Tokens:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, HIDDEN, generator=generator).to(torch.bfloat16)
        scores = torch.rand(count, EXPERTS, generator=generator)
        ids = scores.topk(TOP_K, dim=-1).indices
        raw = torch.rand(count, TOP_K, generator=generator) + 0.1
        return cls(x=x, ids=ids, weights=2 * raw / raw.sum(dim=-1, keepdim=True))


def matrices(seed: int = 0) -> dict[str, Tensor]:
    """bfloat16 {"w1", "w3": [E, I, H], "w2": [E, H, I]}."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), "w3": (WIDTH, HIDDEN)}
    return {
        name: (torch.randn(EXPERTS, *shape, generator=generator) * shape[1] ** -0.5).bfloat16()
        for name, shape in shapes.items()
    }


def shards(plain: Mapping[str, Tensor], form: str) -> Iterator[tuple[str, str, int, Tensor]]:
    """(parameter, shard, expert, tensor) of every tensor of a checkpoint's experts."""
    for shard in SHARDS:
        prefix = "w2" if shard == "w2" else "w13"
        for expert, weight in enumerate(plain[shard]):
            if form == "bf16":
                yield f"{prefix}_weight", shard, expert, weight
                continue
            elements, scales = mxfp8.quantise(weight)
            yield f"{prefix}_weight", shard, expert, elements
            yield f"{prefix}_weight_scale", shard, expert, scales


def stored(plain: Mapping[str, Tensor], form: str) -> dense.Experts:
    """The matrices that the kernel has, in float64."""
    wide = {
        name: (w if form == "bf16" else mxfp8.dequantise(*mxfp8.quantise(w))).to(torch.float64)
        for name, w in plain.items()
    }
    return dense.Experts.exact(wide["w1"], wide["w3"], wide["w2"])


@contextmanager
def rank(ctx: RankContext, tiny: MegaTinyM3 = TINY) -> Iterator[Any]:
    """One rank's groups and configuration in place; yields the configuration."""
    config = vllm_config(tiny, ctx.topology, torch.bfloat16, ctx.rank)
    config.kernel_config.moe_backend = "deep_gemm_mega_moe"
    state = importlib.import_module("vllm.distributed.parallel_state")
    current = importlib.import_module("vllm.config").set_current_vllm_config
    with current(config), torch.no_grad():
        state.init_distributed_environment(
            ctx.world_size, ctx.rank, local_rank=ctx.rank, backend=dist.get_backend()
        )
        state.initialize_model_parallel(
            ctx.topology.tp, ctx.topology.pp, backend=dist.get_backend()
        )
        ep = state.get_ep_group()
        label_group(ep.device_group, "ep")
        label_group(ep.cpu_group, "ep.cpu")
        yield config


def build(ctx: RankContext, config: Any, form: str, **changes: Any) -> Any:
    """vLLM's experts of this rank, without weights."""
    vllm = importlib.import_module("vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe")
    ep = importlib.import_module("vllm.distributed").get_ep_group()
    local = EXPERTS // ep.world_size
    arguments: dict[str, Any] = {
        "num_experts": EXPERTS,
        "num_local_experts": local,
        "experts_start_idx": ep.rank_in_group * local,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "activation": vllm.MegaMoEActivation("swiglu", dense.CLAMP, dense.ALPHA, dense.BETA),
        "weight_format": vllm.MEGA_MOE_WEIGHT_FORMATS[form],
        "prefix": "layers.0.experts",
    }
    return vllm.DeepGemmMegaMoEExperts(config, **(arguments | changes))


def load(experts: Any, plain: Mapping[str, Tensor], form: str) -> None:
    for name, shard, expert, tensor in shards(plain, form):
        param = getattr(experts, name)
        param.weight_loader(param, tensor, name, shard, expert)


def launch(
    word: str,
    form: str,
    plain: Mapping[str, Tensor],
    tokens: Sequence[Tokens],
    *,
    times: int = 1,
    absent: int | None = None,
    tamper: Callable[[RankContext, Any], None] | None = None,
    seed: int | None = None,
) -> tuple[list[Tensor], Ledger]:
    """Each rank's output for its tokens, of the last of `times` launches, and their ledger.

    absent: a rank that stays away from the last launch; tamper: changes a rank's experts after
    loading.
    """

    def program(ctx: RankContext) -> Any:
        with rank(ctx) as config:
            experts = build(ctx, config, form)
            load(experts, plain, form)
            if tamper is not None:
                tamper(ctx, experts)
            return experts

    def step(ctx: RankContext, experts: Sequence[Any]) -> Tensor:
        mine, y = tokens[ctx.rank], torch.empty(0)
        with torch.no_grad():
            for _ in range(times - (ctx.rank == absent)):
                y = experts[ctx.rank](mine.x, mine.weights, mine.ids)
        return y

    with World(word, rank_local=TABLE, seed=seed) as world:
        built = world.run(program)
        world.ledger.clear()
        return world.run(step, built), world.ledger
