"""MiniMax-M3's own MoE block on the ranks of a folded world; each DP rank has its own tokens."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from model import dp, subject
from model.checkpoint import checkpoint
from model.groups import group_labels, join_groups
from model.overlay.rebind import rebound
from model.rank_state import RANK_LOCAL
from model.tiny import TinyM3
from reference import M3Config, Perturbed, as_float64, unit_roundoff
from reference.moe import mixture, route
from sim import Ledger, RankContext, Topology, World, label_group

TINY = TinyM3(layers="m")
MOE = "layers.0.block_sparse_moe"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What to run."""

    word: str
    tokens: tuple[int, ...]
    """Own tokens of each DP rank."""
    idle: bool = False
    """Whether a rank without tokens runs a dummy row."""
    pad: bool = False
    """Whether all ranks pad to the longest."""
    scattered: bool = False
    """Whether the MoE's input is scattered over the TP ranks too, as models of vLLM do that have
    `use_sequence_parallel_moe`."""
    ep: bool | None = None
    """Expert parallelism; None goes by the word."""

    @property
    def topology(self) -> Topology:
        plain = Topology.parse(self.word)
        ep = plain.ep if self.ep is None else self.ep
        return Topology(tp=plain.tp, pp=plain.pp, dp=plain.dp, ep=ep)


@cache
def weights() -> Mapping[str, Tensor]:
    """A full checkpoint in float64, the router's part in float32."""
    return checkpoint(TINY, 0, torch.float64)


@cache
def hidden(dp_rank: int, tokens: int) -> Tensor:
    """float64 [tokens, H], a DP rank's own."""
    generator = torch.Generator().manual_seed(1000 + dp_rank)
    return torch.randn(tokens, TINY.hidden_size, generator=generator, dtype=torch.float64)


def dense(x: Tensor) -> tuple[Tensor, float]:
    """The block by its definition in float64, [T, H] -> [T, H], and how far a subject may be.

    The subject's router works in float32. The bound is as in `reference.bounds`: four times the
    largest move in three runs in which every operation is off by as much as float32 may be.
    """
    config = M3Config.from_hf(TINY.text_config())
    named = {name.removeprefix("model."): weight for name, weight in weights().items()}
    plain = as_float64(config, named)
    noise = Perturbed(
        u_store=unit_roundoff(torch.float64),
        u_acc=unit_roundoff(torch.float32),
        ranks=16,
        generator=torch.Generator().manual_seed(0),
        probes=3,
    )
    probed = x.expand(noise.probes, *x.shape)
    routing = route(config, plain, 0, probed, None, lambda _: 0.0, noise)
    # A near tie might go the other way in float32: these tokens have none.
    assert not x.shape[0] or routing.margin.min() > 1e-5
    out = mixture(config, plain, 0, probed, routing, noise).out
    return out[0], 4 * float((out[1:] - out[0]).abs().max()) if x.numel() else 0.0


@contextmanager
def rank(ctx: RankContext, topology: Topology) -> Iterator[Any]:
    """One rank's groups and configuration in place; yields the configuration."""
    vllm = importlib.import_module("vllm.config")
    made = subject.vllm_config(TINY, Topology(tp=topology.tp), torch.float64, ctx.rank)
    config = vllm.VllmConfig(
        model_config=made.model_config, parallel_config=dp.parallel_config(topology, ctx.rank)
    )
    with vllm.set_current_vllm_config(config), torch.no_grad():
        join_groups(ctx)
        for label, group in group_labels().items():
            label_group(group, label)
        yield config


class Backbone(nn.Module):
    """As much of MiniMaxM3Model as its `load_weights` needs, around one block."""

    def __init__(self, block: nn.Module, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].block_sparse_moe = block
        self.config = config

    def get_expert_mapping(self) -> Any:
        return _minimax().MiniMaxM3Model.get_expert_mapping(self)

    def load(self) -> set[str]:
        part = f"model.{MOE}."
        mine = {n.removeprefix("model."): w for n, w in weights().items() if n.startswith(part)}
        return _minimax().MiniMaxM3Model.load_weights(self, mine.items())


def block(config: Any, *, scattered: bool) -> Any:
    """This rank's MiniMaxM3MoE, loaded.

    scattered: built as vLLM's other models build theirs for sequence-parallel MoE, which
    MiniMax-M3's does not: the experts are told, and the shared expert has whole weights.
    """
    minimax = _minimax()
    text = config.model_config.hf_text_config
    made = minimax.MiniMaxM3MoE.__new__(minimax.MiniMaxM3MoE)
    build = made.__init__
    if scattered:
        build = rebound(
            build,
            FusedMoEFactory=partial(minimax.FusedMoEFactory, is_sequence_parallel=True),
            MiniMaxM3MLP=_whole_mlp,
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        build(text, 0, prefix=f"model.{MOE}")
    finally:
        torch.set_default_dtype(before)
    Backbone(made, text).load()
    loader = importlib.import_module("vllm.model_executor.model_loader.utils")
    loader.process_weights_after_loading(made, config.model_config, torch.device("cpu"))
    return made


class Blocks:
    """A world with a loaded block on every rank."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self.world = World(arm.topology, rank_local=RANK_LOCAL)

        def build(ctx: RankContext) -> None:
            workspace = importlib.import_module("vllm.v1.worker.workspace")
            workspace.init_workspace_manager(torch.device("cpu"))
            with rank(ctx, arm.topology) as config:
                ctx.kept["block"] = block(config, scattered=arm.scattered)
                ctx.kept["config"] = config

        try:
            self.world.run(build)
        except BaseException:
            self.world.close()
            raise

    def close(self) -> None:
        self.world.close()

    @property
    def ledger(self) -> Ledger:
        return self.world.ledger

    def run(self, arm: Arm, change: Callable[[RankContext, Any], Any] | None = None) -> Any:
        """Each rank's own rows of the block's output.

        change: wraps each rank's block in something else to call; `ABSENT` leaves the rank out.
        """
        self.ledger.clear()
        return self.world.run(partial(_step, arm, change))


ABSENT = object()
"""Says that a rank does not launch."""


def _step(
    arm: Arm, change: Callable[[RankContext, Any], Any] | None, ctx: RankContext
) -> Tensor | None:
    made, config = ctx.kept["block"], ctx.kept["config"]
    dp_rank = ctx.topology.coordinates(ctx.rank)["dp"]
    own = hidden(dp_rank, arm.tokens[dp_rank])
    vllm = importlib.import_module("vllm.config")
    with vllm.set_current_vllm_config(config), torch.no_grad():
        rows = dp.agree(config, own.shape[0], idle=arm.idle, pad=arm.pad)
        # What pads and dummy rows hold must not matter to real rows.
        x = torch.full((rows.count, TINY.hidden_size), 0.5, dtype=torch.float64)
        x[: rows.tokens] = own
        call = partial(_scattered, made) if arm.scattered else made
        if change is not None:
            call = change(ctx, call)
        if call is ABSENT:
            return None
        with dp.forward_context(config, None, rows):
            out = call(x)
    return out[: rows.tokens]


def _scattered(made: Any, x: Tensor) -> Tensor:
    """Around a block with scattered input, as in vLLM's other models: chunk, block, gather."""
    utils = importlib.import_module("vllm.model_executor.models.utils")
    distributed = importlib.import_module("vllm.distributed")
    mine = made(utils.sequence_parallel_chunk(x))
    return distributed.tensor_model_parallel_all_gather(mine, 0)[: x.shape[0]]


def _whole_mlp(reduce_results: bool = True, **kwargs: Any) -> Any:
    return importlib.import_module("model.megamoe.block").MiniMaxM3ReplicatedMLP(**kwargs)


def _minimax() -> Any:
    return importlib.import_module("vllm.models.minimax_m3.nvidia.model")


def wrong(arm: Arm, results: Sequence[Tensor]) -> list[int]:
    """The ranks whose rows are not those of the definition, within its bound."""
    exact = [dense(hidden(rank, tokens)) for rank, tokens in enumerate(arm.tokens)]
    found = []
    for rank_, out in enumerate(results):
        want, bound = exact[arm.topology.coordinates(rank_)["dp"]]
        if out.shape != want.shape or not bool(((out - want).abs() <= bound).all()):
            found.append(rank_)
    return found
