"""MiniMax-M3's MegaMoE block: routing, experts, shared expert, padding and loading."""

import importlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.checkpoint import checkpoint
from model.megamoe import deep_gemm
from model.megamoe.tiny import MegaTinyM3, dequantise_experts, quantise_experts
from sim import Ledger, RankContext, RankFailed, World
from tests.model.megamoe import dense
from tests.model.megamoe.harness import EXPERTS, HIDDEN, TABLE, TOP_K, rank
from tests.model.megamoe.test_experts import staged

pytestmark = pytest.mark.usefixtures("mega_ready")

TINY = {form: MegaTinyM3(layers="m", expert_dtype=form) for form in ("bf16", "mxfp8")}
MOE = "layers.0.block_sparse_moe"


def weights(form: str) -> dict[str, Tensor]:
    """The block's part of a full checkpoint, by a backbone's names."""
    full = checkpoint(TINY[form], 0, torch.bfloat16)
    full = quantise_experts(full) if form == "mxfp8" else full
    part = f"model.{MOE}."
    return {name.removeprefix("model."): w for name, w in full.items() if name.startswith(part)}


class Backbone(nn.Module):
    """As much of MiniMaxM3Model as its `load_weights` needs, around one block."""

    def __init__(self, block: nn.Module, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].block_sparse_moe = block
        self.experts = experts

    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
        return importlib.import_module("model.megamoe.block").mega_moe_expert_mapping(self.experts)

    def load(self, tensors: Mapping[str, Tensor]) -> set[str]:
        minimax = importlib.import_module("vllm.models.minimax_m3.nvidia.model")
        block = importlib.import_module("model.megamoe.block")
        rest = block.load_fused_shared_experts(self, tensors.items())
        return minimax.MiniMaxM3Model.load_weights(self, rest)


def make(config: Any) -> Any:
    """A block without weights, as a layer of vLLM's builds it."""
    block = importlib.import_module("model.megamoe.block")
    text = config.model_config.hf_text_config
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return block.MiniMaxM3MegaMoE(
            text, 0, config.quant_config, prefix=f"model.{MOE}", vllm_config=config
        )
    finally:
        torch.set_default_dtype(before)


class Rank:
    """A loaded block and what its experts were given and gave in the last call."""

    def __init__(self, config: Any, form: str) -> None:
        self.config, self.block = config, make(config)
        self.loaded = Backbone(self.block, EXPERTS).load(weights(form))
        self.given: tuple[Tensor, ...] = ()
        self.block.experts.register_forward_pre_hook(self._keep)

    def _keep(self, _module: nn.Module, given: tuple[Any, ...]) -> None:
        self.given = given

    def __call__(
        self, x: Tensor, padding: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Run on x, with a mask of its own, in a context that has the mask `context`."""
        forward = importlib.import_module("vllm.forward_context")
        with (
            torch.no_grad(),
            forward.set_forward_context(None, self.config, num_tokens=len(x), is_padding=context),
        ):
            y = self.block(x, padding)
            assert forward.get_forward_context().is_padding is context
            return y


def run(word: str, form: str, program: Any) -> tuple[list[Any], Ledger]:
    """Run program(ctx, Rank) on all ranks; the ledger is that of the program alone."""

    def build(ctx: RankContext) -> Rank:
        with rank(ctx, TINY[form]) as config:
            return Rank(config, form)

    with World(word, rank_local=TABLE) as world:
        ranks = world.run(build)
        world.ledger.clear()
        return world.run(lambda ctx: program(ctx, ranks[ctx.rank])), world.ledger


def hidden(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=generator).to(torch.bfloat16)


def stack(form: str) -> dense.Experts:
    plain = dequantise_experts(weights(form), torch.float64)
    wide = {
        w: torch.stack([plain[f"{MOE}.experts.{e}.{w}.weight"] for e in range(EXPERTS)]).double()
        for w in ("w1", "w3", "w2")
    }
    return dense.Experts.exact(**wide)


@pytest.mark.parametrize("form", ["bf16", "mxfp8"])
@pytest.mark.parametrize(
    ("word", "counts"),
    [
        ("tep1", [6]),
        ("tep2", [3, 4]),
        ("tep4", [2, 0, 3, 1]),
        ("tep8", [1, 0, 0, 2, 1, 0, 1, 1]),
    ],
)
def test_the_block_is_routing_plus_experts_plus_shared(
    word: str, form: str, counts: Sequence[int]
) -> None:
    def program(ctx: RankContext, it: Rank) -> dict[str, Tensor]:
        x = hidden(counts[ctx.rank], ctx.rank)
        y = it(x)
        given, topk_weights, topk_ids, shared = it.given
        assert given is x and topk_ids.dtype == torch.int64
        routed = torch.empty(0)
        with torch.no_grad():
            routed = it.block.experts(x, topk_weights, topk_ids)
            beside = shared(x)
        both = routed + beside
        return {"x": x, "y": y, "w": topk_weights, "ids": topk_ids, "routed": routed, "sum": both}

    results, _ = run(word, form, program)
    gate = weights(form)[f"{MOE}.gate.weight"].double()
    bias = weights(form)[f"{MOE}.e_score_correction_bias"].double()
    for result in results:
        x, ids = result["x"].double(), result["ids"]
        scores = torch.sigmoid(x @ gate.T)
        assert torch.equal((scores + bias).topk(TOP_K, dim=-1).indices, ids)
        chosen = scores.gather(1, ids)
        # The scaling factor 2 is in the weights, and nowhere else.
        wanted = 2 * chosen / chosen.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(result["w"].double(), wanted, rtol=1e-5, atol=0)
        x = staged(result["x"], form)
        exact = dense.dense(x, stack(form), ids, result["w"])
        limit = dense.bound(
            x, torch.zeros_like(x), stack(form), ids, result["w"], mxfp8=form == "mxfp8"
        )
        assert ((result["routed"].double() - exact).abs() <= limit).all()
        assert torch.equal(result["y"], result["sum"])
        assert result["y"].shape == result["x"].shape


def test_the_block_adds_no_exchange_to_that_of_the_experts() -> None:
    _, ledger = run("tep4", "bf16", lambda ctx, it: [it(hidden(2, ctx.rank)) for _ in range(2)])
    operations = [(entry.group, entry.op) for entry in ledger.entries]
    launch = [("ep", "all_to_all_single")] * 3
    assert operations == [("ep.cpu", "barrier"), ("ep", "barrier"), *launch, *launch]


@pytest.mark.parametrize("form", ["bf16", "mxfp8"])
@pytest.mark.parametrize("whole", [None, torch.tensor([False] * 7 + [True])])
def test_padding_goes_to_no_expert_and_reaches_no_row(form: str, whole: Tensor | None) -> None:
    """Rank 1's shard ends in poisoned rows. The context's own mask is that of all 8 rows, of
    which rows 4 to 7 are rank 1's: sliced by a shard's length it would spare every row."""
    padding = [torch.zeros(4, dtype=torch.bool), torch.tensor([False, False, True, True])]

    def program(ctx: RankContext, it: Rank) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden(4, ctx.rank)
        x[padding[ctx.rank]] = torch.nan
        y = it(x, padding[ctx.rank], whole)
        _, topk_weights, topk_ids, _ = it.given
        return y, topk_weights, topk_ids

    def without(ctx: RankContext, it: Rank) -> Tensor:
        return it(hidden(4, ctx.rank)[~padding[ctx.rank]])

    padded, _ = run("tep2", form, program)
    short, _ = run("tep2", form, without)
    for (y, topk_weights, topk_ids), mask, wanted in zip(padded, padding, short, strict=True):
        assert (topk_ids[mask] == -1).all() and not topk_weights[mask].any()
        assert (topk_ids[~mask] >= 0).all()
        assert y[~mask].isfinite().all()
        # The shared expert's GEMM may take another path for another number of rows.
        torch.testing.assert_close(y[~mask], wanted, rtol=2**-6, atol=2**-6)


def test_a_mask_needs_a_forward_context() -> None:
    def program(ctx: RankContext, it: Rank) -> None:
        it.block(hidden(1, 0), torch.zeros(1, dtype=torch.bool))

    with pytest.raises(RankFailed, match="is_padding is given outside of a forward context"):
        run("tep1", "bf16", program)


@pytest.mark.parametrize("form", ["bf16", "mxfp8"])
def test_vllms_loading_fills_every_parameter_and_replicates_the_shared_expert(form: str) -> None:
    def program(ctx: RankContext, it: Rank) -> tuple[set[str], dict[str, Tensor]]:
        named = Backbone(it.block, EXPERTS).named_parameters()
        return it.loaded, {name: param.data for name, param in named}

    results, _ = run("tep4", form, program)
    given = weights(form)
    for loaded, params in results:
        assert set(params) == {name for name in loaded if name in params}
        shared = f"{MOE}.shared_experts"
        gate_up = [given[f"{shared}.{name}.weight"] for name in ("gate_proj", "up_proj")]
        assert torch.equal(params[f"{shared}.gate_up_proj.weight"], torch.cat(gate_up))
        assert torch.equal(
            params[f"{shared}.down_proj.weight"], given[f"{shared}.down_proj.weight"]
        )
        assert torch.equal(params[f"{MOE}.gate.weight"], given[f"{MOE}.gate.weight"])
        assert f"{MOE}.experts.w13_weight" in params
        assert (f"{MOE}.experts.w2_weight_scale" in params) == (form == "mxfp8")


def test_the_experts_decide_by_themselves_to_keep_the_shared_expert_apart() -> None:
    def program(ctx: RankContext, it: Rank) -> tuple[bool, str]:
        return it.block.experts.has_fused_shared_experts, type(it.block.shared_experts).__name__

    results, _ = run("tep2", "bf16", program)
    assert results == [(False, "MiniMaxM3ReplicatedMLP")] * 2


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A deep_gemm whose launch takes a shared expert, as the real one's does."""

    def kernel(
        y: Any, l1: Any, l2: Any, buffer: Any, shared_l1_weights: Any, shared_l2_weights: Any
    ) -> None:
        raise AssertionError("only its signature is asked for")

    buffer = deep_gemm.get_symm_buffer_for_mega_moe
    module = types.SimpleNamespace(bf16_mega_moe=kernel, get_symm_buffer_for_mega_moe=buffer)
    target = importlib.import_module("vllm.utils.deep_gemm")
    monkeypatch.setattr(target, "_import_deep_gemm", lambda: module)
    yield


def test_a_fused_shared_expert_is_loaded_into_the_launchs_weights(fusing: None) -> None:
    def program(ctx: RankContext, it: Rank) -> tuple[Any, Tensor, Tensor]:
        experts = it.block.experts
        assert experts.has_fused_shared_experts
        return it.block.shared_experts, experts.shared_l1_weight, experts.shared_l2_weight

    results, _ = run("tep2", "bf16", program)
    given = {name.rpartition("shared_experts.")[2]: w for name, w in weights("bf16").items()}
    for module, l1, l2 in results:
        assert module is None
        turns = l1.view(-1, 2, 8, HIDDEN)
        assert torch.equal(turns[:, 0].reshape(-1, HIDDEN), given["gate_proj.weight"])
        assert torch.equal(turns[:, 1].reshape(-1, HIDDEN), given["up_proj.weight"])
        assert torch.equal(l2, given["down_proj.weight"])


def test_what_the_block_cannot_be_is_one_line() -> None:
    def build(word: str, change: Any) -> None:
        def program(ctx: RankContext) -> None:
            with rank(ctx, TINY["bf16"]) as config:
                change(config)
                make(config)

        with World(word, rank_local=TABLE) as world:
            world.run(program)

    def odd(config: Any) -> None:
        config.model_config.hf_text_config.num_local_experts = 9

    def wide(config: Any) -> None:
        config.model_config.dtype = torch.float32

    def packed(config: Any) -> None:
        config.model_config.hf_text_config.expert_dtype = "fp4"

    for change, line in (
        (odd, "9 experts do not divide over 2 expert-parallel ranks"),
        (wide, "MegaMoE returns bfloat16, so the model cannot be in torch.float32"),
        (packed, "experts are bf16 or mxfp8, not fp4; use such a checkpoint"),
    ):
        with pytest.raises(RankFailed, match=line):
            build("tep2", change)


class Quantisation:
    """As much as is asked of a quantisation configuration of vLLM's."""

    def __init__(self, name: str, *excluded: str) -> None:
        self.name, self.excluded = name, excluded

    def get_name(self) -> str:
        return self.name

    def is_layer_excluded(self, prefix: str) -> bool:
        return any(part in prefix for part in self.excluded)


def test_the_format_follows_the_checkpoints_configuration() -> None:
    choose = importlib.import_module("model.megamoe.block").weight_format
    plain, mxfp8 = types.SimpleNamespace(), types.SimpleNamespace(expert_dtype="mxfp8")
    assert choose(plain, None, "experts").name == "bf16"
    assert choose(mxfp8, None, "experts").name == "mxfp8"
    assert choose(plain, Quantisation("modelopt_mxfp8"), "experts").name == "mxfp8"
    assert choose(plain, Quantisation("modelopt_mxfp8", "exp"), "experts").name == "bf16"
    with pytest.raises(NotImplementedError, match="bf16 or mxfp8, not fp8"):
        choose(plain, Quantisation("fp8"), "experts")
