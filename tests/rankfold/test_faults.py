"""Faults put into vLLM's running code: `check` fails, and says where and how.

Each fault is patched in for one test; the same check without it holds (test_acceptance).
"""

from typing import Any

import pytest
import torch

from model.subject import prepare
from properties import Verdict
from rankfold.check import Options, run_check
from rankfold.report import Report
from sim import Topology


@pytest.fixture(scope="module")
def m3() -> Any:
    """vLLM's module, with the overrides installed."""
    prepare()
    import vllm.models.minimax_m3.nvidia.model as module

    return module


def check(word: str) -> Report:
    options = Options(topology=Topology.parse(word), tokens=5)
    return run_check(options, progress=lambda text: None)


def first_wrong(report: Report) -> tuple[str, str]:
    """The first wrong tap and why."""
    tap = next(tap for tap in report.taps if not tap.ok)
    return tap.name, tap.why


def broke(report: Report) -> Verdict:
    """The verdict on a step that did not come to its end."""
    assert report.broke is not None
    return next(v for v in report.checks if v.name in ("run", "ledger") and not v.ok)


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    from vllm.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(x)


def test_dense_output_reduced_twice(m3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = m3.MiniMaxM3MLP.forward

    def twice(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        return all_reduce(out) if self.down_proj.reduce_results else out

    monkeypatch.setattr(m3.MiniMaxM3MLP, "forward", twice)
    report = check("tp2pp2")
    assert not report.ok
    assert first_wrong(report) == (
        "layers.0.ffn",
        "is 2 x the full value: summed over tp once too often",
    )
    assert "layers.0.ffn" in report.headline


def test_moe_output_reduced_twice(m3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = m3.MiniMaxM3MoE.forward
    monkeypatch.setattr(m3.MiniMaxM3MoE, "forward", lambda self, x: all_reduce(forward(self, x)))
    report = check("tep4pp2")
    name, why = first_wrong(report)
    assert name == "layers.1.ffn"
    assert why.startswith("is 4 x the full value")


def test_stage_output_left_unreduced(m3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    init = m3.MiniMaxM3MLP.__init__

    def unreduced(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "reduce_results": False})

    monkeypatch.setattr(m3.MiniMaxM3MLP, "__init__", unreduced)
    # The dense layer's own flag now says partial: true, but then nobody reduces it.
    monkeypatch.setattr(
        m3.MiniMaxM3DecoderLayer, "ffn_all_reduce_deferred", property(lambda self: False)
    )
    report = check("tp2pp2")
    assert first_wrong(report) == (
        "layers.0.ffn",
        "looks like Partial(tp): a reduction over tp is missing",
    )


def test_tokens_swapped_at_the_stage_boundary(m3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.parallel_state import GroupCoordinator

    receive = GroupCoordinator.recv_tensor_dict

    def swapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = receive(self, *args, **kwargs)
        hidden = tensors["hidden_states"]
        tensors["hidden_states"] = hidden[[1, 0, *range(2, hidden.shape[0])]]
        return tensors

    monkeypatch.setattr(GroupCoordinator, "recv_tensor_dict", swapped)
    report = check("tp2pp2")
    name, why = first_wrong(report)
    assert name == "stage.1.recv.hidden_states"
    assert why == "rows [0, 1] hold the values of rows [1, 0]"
    transfer = next(c for c in report.checks if c.name == "stage transfer")
    assert not transfer.ok


def test_residual_added_on_every_rank_before_the_sum(
    m3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = m3.fused_allreduce_gemma_rms_norm

    def added_before(hidden: torch.Tensor, residual: torch.Tensor, norm: Any) -> Any:
        return fused(hidden + residual, torch.zeros_like(residual), norm)

    monkeypatch.setattr(m3, "fused_allreduce_gemma_rms_norm", added_before)
    assert first_wrong(check("tp4")) == (
        "layers.0.residual",
        "has the residual 4 times: every rank of tp added it before the sum",
    )


def test_attention_output_left_unreduced(m3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        m3, "fused_allreduce_gemma_rms_norm", lambda hidden, residual, norm: norm(hidden, residual)
    )
    name, why = first_wrong(check("tp2pp2"))
    assert name == "layers.0.residual"
    assert why.endswith("taken before the reduction over tp")


def test_routed_scaling_applied_twice(m3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm._custom_ops as ops

    plain = ops.topk_sigmoid

    def scaled(weights: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        plain(weights, *args, **kwargs)
        weights.mul_(2)

    monkeypatch.setattr(ops, "topk_sigmoid", scaled)
    report = check("tp2")
    assert first_wrong(report)[0] == "layers.1.ffn"


def test_aux_of_one_stage_are_taken_before_their_reduction() -> None:
    """No fault put in: vLLM 0.33 captures EAGLE's aux hidden states before it has reduced the
    layer's output, where the all-reduce is left to the next norm (TP > 1 at one stage)."""
    options = Options(topology=Topology.parse("tp4"), tokens=5, aux=(0, 2))
    report = run_check(options, progress=lambda text: None)
    assert first_wrong(report) == (
        "aux.2",
        "is the residual and this rank's part of the layer's output: taken before the reduction "
        "over tp",
    )
    assert [tap.name for tap in report.taps if not tap.ok] == ["aux.2"]


def test_routing_bias_dropped(m3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = m3.MiniMaxM3MoE.ebias_weight_loader
    monkeypatch.setattr(
        m3.MiniMaxM3MoE,
        "ebias_weight_loader",
        staticmethod(lambda param, weight: loader(param, torch.zeros_like(weight))),
    )
    report = check("tp2")
    routing = next(c for c in report.checks if c.name == "routing")
    assert not routing.ok
    assert routing.where.startswith("layers.1.experts_chosen")


def test_a_rank_that_skips_an_all_reduce_is_no_hang(
    m3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed import get_tp_group

    fused = m3.fused_allreduce_gemma_rms_norm

    def skips(hidden: torch.Tensor, residual: torch.Tensor, norm: Any) -> Any:
        if get_tp_group().rank_in_group == 1:
            return norm(hidden, residual)
        return fused(hidden, residual, norm)

    monkeypatch.setattr(m3, "fused_allreduce_gemma_rms_norm", skips)
    verdict = broke(check("tp2"))
    assert verdict.what.startswith(("the step broke: deadlock", "the step broke: mismatch"))
    assert "tp[0, 1]" in verdict.where
    assert "vllm/" in verdict.where


def test_a_rank_that_raises_names_itself(m3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import get_tp_group

    forward = m3.MiniMaxM3MLP.forward

    def raises(self: Any, x: torch.Tensor) -> torch.Tensor:
        if get_tp_group().rank_in_group == 1:
            raise RuntimeError("out of luck")
        return forward(self, x)

    monkeypatch.setattr(m3.MiniMaxM3MLP, "forward", raises)
    report = check("tp2")
    verdict = broke(report)
    assert (
        "rank 1 raised RuntimeError: out of luck at tests/rankfold/test_faults.py" in verdict.what
    )
    # The taps until then are judged too: here they are right.
    assert report.taps[-1].name == "layers.0.residual"
    assert all(tap.ok for tap in report.taps)
