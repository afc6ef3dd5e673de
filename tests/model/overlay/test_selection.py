"""Where the overlay stands aside, nothing of it runs."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from model import overlay
from model.rank_state import RANK_LOCAL
from model.subject import Subject
from sim import RankContext, World
from tests.model.overlay.drive import Arm, run

MODULE = "vllm.models.minimax_m3.nvidia.model"


def config_of(backend: str, *, expert_parallel: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        kernel_config=SimpleNamespace(moe_backend=backend),
        parallel_config=SimpleNamespace(
            enable_expert_parallel=expert_parallel,
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
        ),
        additional_config={},
    )


def test_the_class_to_build(mega_ready: None) -> None:
    own = importlib.import_module(MODULE).MiniMaxM3SparseForCausalLM
    assert overlay.needed()
    for backend in ("auto", "triton", "deep_gemm"):
        assert overlay.model_class(config_of(backend)) is own
    chosen = overlay.model_class(config_of("deep_gemm_mega_moe"))
    assert chosen is not own and issubclass(chosen, own)
    with patch.object(
        importlib.import_module(MODULE), "_use_sequence_parallel", lambda _: True, create=True
    ):
        assert not overlay.needed()
        assert overlay.model_class(config_of("deep_gemm_mega_moe")) is own


def test_mega_moe_without_expert_parallelism_is_refused_in_a_line(mega_ready: None) -> None:
    with pytest.raises(NotImplementedError) as caught:
        overlay.model_class(config_of("deep_gemm_mega_moe", expert_parallel=False))
    assert "requires expert parallel" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tp", "pp", "expected"), [(1, 1, False), (2, 1, True), (2, 4, True), (1, 4, False)]
)
def test_sequence_parallelism_asks_for_tp_and_for_nothing_of_pp(
    mega_ready: None, tp: int, pp: int, expected: bool
) -> None:
    from model.overlay import config

    made = config_of("deep_gemm_mega_moe")
    made.parallel_config.tensor_parallel_size = tp
    made.parallel_config.pipeline_parallel_size = pp
    assert config.use_sequence_parallel(made) is expected
    made.additional_config = {overlay.SEQUENCE_PARALLEL_KEY: False}
    assert config.use_sequence_parallel(made) is False


def test_describe_says_whose_model_runs(stepped) -> None:
    assert stepped(Arm(word="tep2")).ranks[0].whose == "overlay"
    assert stepped(Arm(word="tep2", sp=False)).ranks[0].whose == "overlay"
    assert stepped(Arm(word="tp2", mega=False)).ranks[0].whose == "vLLM's own"


@pytest.mark.parametrize("word", ["tp2", "tep4", "tp2pp2", "tep2pp2"])
def test_other_backends_make_the_exchanges_of_a_vllm_without_the_overlay(
    mega_ready: None, word: str
) -> None:
    arm = Arm(word=word, mega=False, dtype=torch.float32)
    with_overlay = run(arm)

    def program(ctx: RankContext) -> torch.Tensor | None:
        return Subject(ctx, arm.tiny, arm.weights).step(arm.batch).logprobs

    def exchanges(entries: list) -> list[tuple]:
        return [(e.op, e.ranks, e.dtype, e.shapes, e.bytes, e.detail) for e in entries]

    with World(word, rank_local=RANK_LOCAL) as world:
        without = world.run(program)
        ledger = exchanges(world.ledger.entries)
    step = exchanges(with_overlay.ledger)
    # The subject's ledger also has the making of the groups.
    assert step and ledger[-len(step) :] == step
    assert torch.equal(with_overlay.logprobs, without[-1])


def test_building_the_overlay_leaves_vllm_as_it_was(mega_ready: None) -> None:
    module = importlib.import_module(MODULE)

    def names() -> dict[str, int]:
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        owners = [module, *(c for c in classes if c.__module__ == MODULE)]
        return {
            f"{getattr(owner, '__qualname__', MODULE)}.{name}": id(value)
            for owner in owners
            for name, value in vars(owner).items()
            if not name.startswith("_abc_")
        }

    before = names()
    run(Arm(word="tep2pp2"))
    assert names() == before
