"""Values that are overwritten under their readers are named; work in place by contract is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from model.subject import prepare
from model.tiny import TinyM3
from properties import Verdict
from properties.aliasing import inputs_survive
from tests.properties.stepping import MEGA, PLAIN, Shared, built


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    prepare()


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    worlds = Shared()
    yield worlds
    worlds.close()


def judge(
    word: str, tiny: TinyM3 = PLAIN, *, tokens: int = 5, aux: tuple[int, ...] = ()
) -> Verdict:
    """The verdict on the second of two steps, and that the first had the same."""
    with built(word, tiny, aux=aux) as subject:
        verdicts = []
        for seed in (0, 1):
            results = subject.step(subject.random(tokens, seed=seed))
            verdicts.append(inputs_survive([result.overwritten for result in results]))
    assert [v.ok for v in verdicts] == [verdicts[0].ok] * 2
    return verdicts[0]


@pytest.mark.parametrize("tiny", [PLAIN, MEGA], ids=["plain", "mega"])
@pytest.mark.parametrize("word", ["tp1", "tep2", "tep2pp2", "tep4"])
def test_vllm_overwrites_nothing_too_early(shared: Shared, word: str, tiny: TinyM3) -> None:
    if tiny is MEGA and word == "tp1":
        word = "tep2"
    subject = shared.of(word, tiny, aux=(0, 1, 2, 3))
    for tokens in (0, 1, 3, 8):
        results = subject.step(subject.random(tokens))
        verdict = inputs_survive([result.overwritten for result in results])
        assert verdict.ok, verdict


def fails(verdict: Verdict, what: str, where: str, why: str) -> None:
    assert not verdict.ok
    assert (verdict.name, verdict.kind) == ("aliasing", "overwritten")
    assert verdict.what == what
    assert verdict.where == where
    assert verdict.why.startswith(why)


# --- inputs of an MoE block ---


def test_routed_experts_that_overwrite_what_the_shared_expert_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from model.megamoe import prepare as staging

    def in_place(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        stage(hidden_states, *args, **kwargs)
        hidden_states[:1] += 1

    stage = staging.stage
    monkeypatch.setattr(staging, "stage", in_place)
    fails(
        judge("tep2", MEGA),
        "input of layers.1.block_sparse_moe is overwritten before "
        "layers.1.block_sparse_moe.shared_experts reads it",
        "layers.1.block_sparse_moe.shared_experts, ranks [0, 1], rows 0",
        "its memory was written by layers.1.block_sparse_moe.experts; later values",
    )


def test_shared_expert_that_overwrites_what_the_routed_experts_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overwrite_input_of_mlp(monkeypatch, shared=True)
    fails(
        judge("tp2pp2"),
        "input of layers.1.block_sparse_moe is overwritten before "
        "layers.1.block_sparse_moe.experts.routed_experts reads it",
        "layers.1.block_sparse_moe.experts.routed_experts, ranks [0, 1], rows 0, 1, 2, 3, 4",
        "its memory was written by layers.1.block_sparse_moe.shared_experts",
    )


def test_the_last_reader_may_overwrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense FFN's input has one reader; MegaMoE's shared expert is the last one of its block."""
    overwrite_input_of_mlp(monkeypatch, shared=False)
    assert judge("tp2pp2").ok
    overwrite_input_of_mlp(monkeypatch, shared=True)
    assert judge("tep2", MEGA).ok


def overwrite_input_of_mlp(patch: pytest.MonkeyPatch, *, shared: bool) -> None:
    """Have gated MLPs put their output where their input was: shared experts, or dense FFNs."""
    import vllm.models.minimax_m3.nvidia.model as m3

    forward = m3.MiniMaxM3MLP.forward

    def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        if ("shared_experts" in self.down_proj.prefix) == shared:
            x.copy_(out)
        return out

    patch.setattr(m3.MiniMaxM3MLP, "forward", in_place)


def test_a_copy_may_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared expert works in place on a copy of its own."""
    import vllm.models.minimax_m3.nvidia.model as m3

    forward = m3.MiniMaxM3MLP.forward

    def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
        own = x.clone()
        out = forward(self, own)
        return own.copy_(out)

    monkeypatch.setattr(m3.MiniMaxM3MLP, "forward", in_place)
    assert judge("tp2").ok


# --- aux hidden states ---


class Uncopied(torch.Tensor):
    """A tensor whose copy is itself."""

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        return self


def test_aux_that_shares_memory_with_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM copies the embedding, since later norms add to the residual in place."""
    import vllm.models.minimax_m3.nvidia.model as m3

    capture = m3.MiniMaxM3Model._maybe_add_hidden_state

    def uncopied(self: Any, captured: list[torch.Tensor], layer: int, *args: Any) -> Any:
        capture(self, captured, layer, *args)
        if layer == 0 and captured:
            captured[-1] = captured[-1].as_subclass(Uncopied)
        return captured

    monkeypatch.setattr(m3.MiniMaxM3Model, "_maybe_add_hidden_state", uncopied)
    fails(
        judge("tp2pp2", aux=(0, 2), tokens=2),
        "aux hidden state 0 is overwritten before its receiver reads it",
        "its receiver, ranks [0, 1], rows 0, 1",
        "its memory was written by the stage's forward pass",
    )


@pytest.mark.parametrize("buffers", [1, 2])
def test_aux_in_a_buffer_that_is_used_again(monkeypatch: pytest.MonkeyPatch, buffers: int) -> None:
    """One buffer for two captures is wrong, two are right, though both live on over steps."""
    import vllm.models.minimax_m3.nvidia.model as m3

    capture = m3.MiniMaxM3Model._maybe_add_hidden_state

    def buffered(self: Any, captured: list[torch.Tensor], layer: int, *args: Any) -> Any:
        before = len(captured)
        capture(self, captured, layer, *args)
        if len(captured) > before:
            value = captured[-1]
            own = self.__dict__.setdefault("buffers", {})
            slot = own.setdefault(layer % buffers, torch.zeros(8, value.shape[1]))
            captured[-1] = slot[: value.shape[0]].copy_(value)
        return captured

    monkeypatch.setattr(m3.MiniMaxM3Model, "_maybe_add_hidden_state", buffered)
    verdict = judge("tp2", aux=(1, 2))
    assert verdict.ok == (buffers == 2)
    if buffers == 1:
        assert verdict.at == "aux.1"


# --- weights and the batch ---


@pytest.mark.parametrize("restored", [False, True])
def test_weights_that_a_kernel_writes_to(monkeypatch: pytest.MonkeyPatch, restored: bool) -> None:
    """A write that leaves the bits as they were is none."""
    import vllm._custom_ops as ops

    kernel = ops.fused_minimax_m3_qknorm_rope_kv_insert

    def writes(qkv: torch.Tensor, q_norm: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        before = q_norm.clone()
        q_norm[0] += 1
        kernel(qkv, before, *args, **kwargs)
        if restored:
            q_norm.copy_(before)

    monkeypatch.setattr(ops, "fused_minimax_m3_qknorm_rope_kv_insert", writes)
    verdict = judge("tp2")
    if restored:
        assert verdict.ok
    else:
        name = "model.layers.0.self_attn.q_norm.weight"
        what = f"{name} is overwritten before the next step reads it"
        fails(verdict, what, "the next step, ranks [0, 1]", "its memory was written by the step")


def test_positions_that_a_kernel_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm._custom_ops as ops

    kernel = ops.fused_minimax_m3_qknorm_rope_kv_insert

    def moves(*args: Any, **kwargs: Any) -> None:
        kernel(*args, **kwargs)
        args[4][2:] += 1

    monkeypatch.setattr(ops, "fused_minimax_m3_qknorm_rope_kv_insert", moves)
    verdict = judge("tp1")
    assert verdict.at == "the batch's positions"
    assert verdict.where == "the next step, ranks [0], rows 2, 3, 4"
