"""The experts run inside vLLM's modular kernel: only the GEMMs in the middle are ours."""

import pytest
import torch

from model.checkpoint import checkpoint
from model.rank_state import RANK_LOCAL
from model.subject import Subject
from model.tiny import TinyM3
from sim import RankContext, World

pytestmark = pytest.mark.usefixtures("vllm_ready")


@pytest.mark.parametrize("word", ["tp2", "tep2"])
def test_prepare_finalize_runner_and_router_are_vllms(word: str) -> None:
    tiny = TinyM3(layers="m")

    def program(ctx: RankContext) -> dict[str, str]:
        runner = Subject(ctx, tiny, checkpoint(tiny, 0, torch.float32)).model.model.layers[0]
        runner = runner.block_sparse_moe.experts
        kernel = runner._quant_method.moe_kernel
        parts = {
            "runner": runner,
            "router": runner.router,
            "kernel": kernel,
            "prepare_finalize": kernel.prepare_finalize,
            "experts": kernel.fused_experts,
            "method": runner._quant_method,
        }
        return {name: type(part).__module__ for name, part in parts.items()}

    with World(word, rank_local=RANK_LOCAL) as world:
        where = world.run(program)[0]
    ours = {name for name, module in where.items() if not module.startswith("vllm.")}
    assert ours == {"experts", "method"}
    assert where["experts"] == where["method"] == "model.experts_method"


def test_experts_are_sliced_under_tp_and_spread_under_ep() -> None:
    tiny = TinyM3(layers="m")

    def program(ctx: RankContext) -> tuple[list[int], list[int] | None]:
        subject = Subject(ctx, tiny, checkpoint(tiny, 0, torch.float32))
        experts = subject.model.model.layers[0].block_sparse_moe.experts.routed_experts
        mapped = None if experts.expert_map is None else experts.expert_map.tolist()
        return list(experts.w2_weight.shape), mapped

    with World("tp4", rank_local=RANK_LOCAL) as world:
        assert world.run(program) == [([16, 64, 8], None)] * 4
    with World("tep4", rank_local=RANK_LOCAL) as world:
        for rank, (shape, mapped) in enumerate(world.run(program)):
            assert shape == [4, 64, 32]
            here = range(4 * rank, 4 * rank + 4)
            assert mapped == [e - 4 * rank if e in here else -1 for e in range(16)]


def test_every_parameter_is_loaded_once_from_the_checkpoint() -> None:
    tiny = TinyM3(layers="dm")
    weights = checkpoint(tiny, 0, torch.float32)

    def program(ctx: RankContext) -> set[str]:
        model = Subject(ctx, tiny, weights).model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        loaded = model.load_weights(weights.items())
        left = {name for name, p in model.named_parameters() if p.isnan().any()}
        assert loaded, "load_weights says what it loaded"
        return left

    with World("tep2pp2", rank_local=RANK_LOCAL) as world:
        assert world.run(program) == [set()] * 4


def test_another_activation_is_refused() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from model.experts_method import FoldedExperts

    assert FoldedExperts._supports_activation(MoEActivation.SWIGLUOAI_UNINTERLEAVE)
    assert not FoldedExperts._supports_activation(MoEActivation.SWIGLUOAI)
    assert not FoldedExperts._supports_activation(MoEActivation.SILU)
