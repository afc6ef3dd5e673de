"""Loading as vLLM does it holds on every topology; each way to load wrongly is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from model.megamoe.tiny import MegaTinyM3
from model.provenance import Loaded
from model.subject import prepare
from model.tiny import TinyM3
from properties import Verdict
from properties.parameters import loaded_once
from tests.properties import loading
from tests.properties.loading import Case, Weights, feed, judge

MEGA = MegaTinyM3(layers="dm")


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    prepare()


@pytest.mark.parametrize(
    "case",
    [
        *(Case(word=word) for word in ("tp1", "tp2", "tp8", "tep4", "tep8", "pp2", "tep2pp2")),
        Case(word="tp4", tiny=TinyM3(layers="md", num_key_value_heads=2)),
        Case(word="tp4pp2", tiny=TinyM3(layers="dmm")),
        Case(word="tp8", tiny=TinyM3(layers="d", vocab_size=130)),
        Case(word="tp2", tiny=TinyM3(layers="mm", use_routing_bias=False, n_shared_experts=2)),
        Case(word="tep2", dtype=torch.bfloat16),
        Case(word="tp2", dtype=torch.float16),
        Case(word="tp2", dtype=torch.float64),
        Case(word="tep2pp2", tiny=MEGA, dtype=torch.bfloat16),
        Case(word="tep4", tiny=MEGA, dtype=torch.bfloat16, sp=False),
        Case(
            word="tep2",
            tiny=replace(MEGA, layers="m", expert_dtype="mxfp8"),
            dtype=torch.bfloat16,
            quantised=True,
        ),
    ],
    ids=lambda case: f"{case.word}-{case.tiny.layers}-{case.dtype}".replace("torch.", ""),
)
def test_what_vllm_loads_is_right(case: Case) -> None:
    verdict = judge(case)
    assert verdict.ok, verdict
    names = len(loading.weights_of(case))
    assert verdict.what.startswith(f"{names} tensors of the checkpoint")


def test_the_real_weights_are_loaded_as_without_tracing() -> None:
    from model.rank_state import RANK_LOCAL
    from model.subject import Subject
    from sim import World

    case = Case(word="tep2", dtype=torch.bfloat16)
    weights = loading.weights_of(case)

    def program(ctx: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        plain = Subject(ctx, case.tiny, weights, case.dtype)
        traced = Subject(ctx, case.tiny, weights, case.dtype, numbering=loading.numbering_of(case))
        assert plain.loaded is None
        return dict(plain.model.named_parameters()), dict(traced.model.named_parameters())

    with World("tep2", rank_local=RANK_LOCAL) as world:
        for plain, traced in world.run(program):
            assert all(torch.equal(plain[name], traced[name]) for name in plain)


EXPERTS = "model.layers.1.block_sparse_moe.experts"


def fails(verdict: Verdict, what: str, where: str) -> None:
    assert not verdict.ok
    assert verdict.name == "parameters"
    assert what in verdict.what
    assert where in verdict.where
    assert verdict.why


def test_an_expert_in_anothers_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert 5 is overwritten by a second copy of expert 4."""

    def change(_model: Any, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        held = dict(weights)
        for name, weight in held.items():
            yield name, held.get(name.replace(".experts.5.", ".experts.4."), weight)

    feed(monkeypatch, change)
    verdict = judge(Case(word="tep2"))
    fails(verdict, ".experts.4.w1.weight is loaded twice", "rank 0")


def test_an_expert_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, lambda _model, ws: ((n, w) for n, w in ws if ".experts.9." not in n))
    verdict = judge(Case(word="tep2"))
    fails(verdict, "w13_weight is not loaded", "rank 1, experts [9]")


def test_two_experts_in_each_others_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert is loaded once, on the right rank, but the map finds another one."""
    names = {".experts.0.": ".experts.1.", ".experts.1.": ".experts.0."}
    feed(monkeypatch, loading.renamed(**names))
    fails(judge(Case(word="tep2")), "has an expert in the wrong slot", "w13_weight, rank 0")


def test_a_bias_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.models.minimax_m3.nvidia.model as m3

    loader = staticmethod(lambda param, weight: None)
    monkeypatch.setattr(m3.MiniMaxM3MoE, "ebias_weight_loader", loader)
    fails(judge(Case(word="tp2")), "e_score_correction_bias is not loaded", "rank 0")


def test_a_bias_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.models.minimax_m3.nvidia.model as m3

    loader = staticmethod(lambda param, weight: param.data.zero_())
    monkeypatch.setattr(m3.MiniMaxM3MoE, "ebias_weight_loader", loader)
    verdict = judge(Case(word="tp2"))
    fails(verdict, "e_score_correction_bias is not loaded", "rank 0")


def test_key_norms_cut_as_if_no_head_were_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """At TP 8 with 4 key heads, odd ranks take the second half of the head's norm."""

    def change(model: Any, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        from vllm.distributed import get_tensor_model_parallel_rank as tp_rank

        for name, weight in weights:
            half = weight.chunk(2)[tp_rank() % 2] if "k_norm" in name else weight
            yield name, half.repeat(2) if "k_norm" in name else weight

    feed(monkeypatch, change)
    verdict = judge(Case(word="tp8"))
    fails(verdict, "layers.0.self_attn.k_norm.weight has the wrong part", "rank 0")
    assert verdict.why == "8 elements are missing; 8 elements are loaded twice"


def test_a_stage_that_loads_no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the world's rank is taken for the one in the group: no expert is stage 1's."""

    def change(model: Any, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        from vllm.distributed import get_pp_group

        first = get_pp_group().is_first_rank
        return ((name, weight) for name, weight in weights if first or ".experts." not in name)

    feed(monkeypatch, change)
    verdict = judge(Case(word="tep2pp2", tiny=MEGA, dtype=torch.bfloat16))
    fails(verdict, "layers.1.block_sparse_moe.experts.w13_weight is not loaded", "rank 2")
    assert verdict.kind == "is not loaded"


def as_rank(patch: pytest.MonkeyPatch, of: Callable[[Any, int], int]) -> None:
    """Have row-parallel layers load the part of rank `of(layer, rank)`."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    original = RowParallelLinear.weight_loader_v2

    def load(self: Any, param: Any, weight: torch.Tensor) -> None:
        rank, param.tp_rank = param.tp_rank, of(self, param.tp_rank)
        original(self, param, weight)
        param.tp_rank = rank

    patch.setattr(RowParallelLinear, "weight_loader_v2", load)


def test_shared_experts_cut_by_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks each have the same quarter, as where the ranks are counted in another group."""
    as_rank(monkeypatch, lambda layer, r: r // 2 if "shared_experts" in layer.prefix else r)
    verdict = judge(Case(word="tp4"))
    fails(verdict, "shared_experts.down_proj.weight has the wrong part", "rank 1")
    assert verdict.why == "the rank has the part that belongs on rank 0"


def test_two_shards_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, lambda layer, rank: layer.tp_size - 1 - rank)
    verdict = judge(Case(word="tp2"))
    fails(verdict, "layers.0.self_attn.o_proj.weight has the wrong part", "rank 0")
    assert verdict.why == "the rank has the part that belongs on rank 1"


def test_gate_and_up_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"mlp.gate_proj": "mlp.up_proj", "mlp.up_proj": "mlp.gate_proj"}
    feed(monkeypatch, loading.renamed(**names))
    verdict = judge(Case(word="tp2"))
    fails(verdict, "mlp.gate_up_proj.weight has its parts in the wrong order", "rank 0")
    assert verdict.why == "has up_proj, gate_proj where gate_proj, up_proj belongs"


def test_a_layer_with_anothers_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"layers.0.input_layernorm": "layers.1.input_layernorm",
             "layers.1.input_layernorm": "layers.0.input_layernorm"}  # fmt: skip
    feed(monkeypatch, loading.renamed(**names))
    fails(judge(Case(word="tp2")), "holds another layer's weights", "rank 0")


def test_query_norm_for_key_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, loading.renamed(q_norm="k_norm", k_norm="q_norm"))
    fails(judge(Case(word="tp2")), "q_norm.weight has other weights", "rank 0")


def test_an_expert_on_two_ranks_and_one_on_none() -> None:
    case = Case(word="tep2")
    right = loading.load(case)
    name = f"{EXPERTS}.routed_experts.w2_weight"
    first, second = (dict(loaded.parameters) for loaded in right)
    second[name] = first[name]
    loaded = [right[0], Loaded(parameters=second, slots=right[0].slots)]
    verdict = loaded_once(loading.layout_of(case), loading.numbering_of(case), loaded)
    fails(verdict, "experts.0.w2.weight is loaded by 2 ranks", "ranks [0, 1]")


def test_any_placement_of_experts_is_right_that_the_map_agrees_with() -> None:
    """As with round-robin placement: rank 1 and rank 0 have each other's experts."""
    case = Case(word="tep2")
    one, other = loading.load(case)
    experts = list(one.slots)

    def with_experts_of(a: Loaded, b: Loaded) -> Loaded:
        moved = {name: b.parameters[name] for name in experts}
        return Loaded(parameters=a.parameters | moved, slots=b.slots)

    swapped = [with_experts_of(one, other), with_experts_of(other, one)]
    assert loaded_once(loading.layout_of(case), loading.numbering_of(case), swapped).ok
