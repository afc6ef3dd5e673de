"""The real MiniMax-M3, cut in many ways, is one model."""

import threading

import pytest
import torch

from model.batch import Batch
from model.checkpoint import checkpoint
from model.rank_state import RANK_LOCAL
from model.subject import StepResult, Subject, check
from model.tiny import ShapeError, TinyM3
from sim import RankContext, RankFailed, Topology, World

CUTS = ["tp2", "tp4", "tp8", "pp2", "pp4", "tp2pp2", "tep2pp2", "tep4pp2", "tp2pp4", "tep8"]


def logits(results: list[StepResult]) -> torch.Tensor:
    """The logits of the last stage, which all its ranks have alike."""
    last = [r.logits for r in results if r.logits is not None]
    assert last and all(torch.equal(last[0], other) for other in last)
    return last[0]


@pytest.mark.parametrize("word", CUTS)
def test_every_cut_agrees_with_one_rank(fold, word: str) -> None:
    assert (logits(fold(word)) - logits(fold("tp1"))).abs().max() < 1e-4


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 33])
@pytest.mark.parametrize("word", ["tp4", "tep2pp2"])
def test_every_number_of_tokens(fold, word: str, tokens: int) -> None:
    cut, whole = (logits(fold(w, tokens=tokens, sequences=1)) for w in (word, "tp1"))
    assert cut.shape == (tokens, TinyM3().vocab_size)
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("word", "against"),
    [("pp2", "tp1"), ("pp4", "tp1"), ("tp2pp2", "tp2"), ("tp2pp4", "tp2"), ("tep4pp2", "tep4")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_change_nothing_at_all(fold, word: str, against: str, dtype: torch.dtype) -> None:
    assert torch.equal(logits(fold(word, dtype=dtype)), logits(fold(against, dtype=dtype)))


def test_float64_agrees_to_its_own_rounding(fold) -> None:
    cut, whole = (logits(fold(w, dtype=torch.float64)) for w in ("tp2", "tp1"))
    assert cut.dtype == torch.float64
    assert (cut - whole).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float64(fold, dtype: torch.dtype) -> None:
    # Dense layers only: a rounding may flip a near tie between experts.
    tiny = TinyM3(layers="dddd")
    half = logits(fold("tp2", tiny=tiny, dtype=dtype)).double()
    exact = logits(fold("tp1", tiny=tiny, dtype=torch.float64))
    error = (half - exact).abs().mean()
    assert 0 < error < {torch.bfloat16: 5e-2, torch.float16: 8e-3}[dtype]


def test_a_vocabulary_that_needs_padding(fold) -> None:
    tiny = TinyM3(vocab_size=250)
    cut, whole = (logits(fold(w, tiny=tiny)) for w in ("tp8", "tp1"))
    assert cut.shape == whole.shape == (8, 250)
    assert (cut - whole).abs().max() < 1e-4


def test_sequences_do_not_see_each_other_nor_the_future(fold, vllm_ready: None) -> None:
    tiny = TinyM3()
    weights = checkpoint(tiny, 0, torch.float32)
    ids = Batch.random(6, tiny.vocab_size, seed=0).token_ids
    changed = ids.clone()
    changed[4] = (changed[4] + 1) % tiny.vocab_size

    def program(ctx: RankContext) -> list[torch.Tensor | None]:
        subject = Subject(ctx, tiny, weights)
        batches = [Batch.of(ids, (3, 3)), Batch.of(changed, (3, 3)), Batch.of(ids, (6,))]
        return [subject.step(batch, capture=False).logits for batch in batches]

    with World("tp2", rank_local=RANK_LOCAL) as world:
        base, other_token, one_sequence = world.run(program)[0]
    assert torch.equal(base[:4], other_token[:4])
    assert (base[4:] != other_token[4:]).any(dim=1).all()
    assert torch.allclose(base[:3], one_sequence[:3], atol=1e-4)
    assert ((base[3:] - one_sequence[3:]).abs().amax(dim=1) > 1e-2).all()


def test_logprobs_are_the_log_softmax_of_the_logits(fold) -> None:
    result = fold("pp2")[-1]
    assert result.logprobs.dtype == torch.float32
    assert torch.allclose(result.logprobs.exp().sum(dim=-1), torch.ones(8))
    shift = result.logits - result.logprobs
    assert torch.allclose(shift, shift[:, :1].expand_as(shift), atol=1e-4)
    assert fold("pp2")[0].logits is None and fold("pp2")[0].logprobs is None


def test_labels_name_the_groups_a_rank_is_in(vllm_ready: None) -> None:
    import torch.distributed as dist

    tiny = TinyM3()
    weights = checkpoint(tiny, 0, torch.float32)

    def program(ctx: RankContext) -> dict[str, list[int]]:
        groups = Subject(ctx, tiny, weights).labels()
        return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}

    with World("tep2pp2", rank_local=RANK_LOCAL) as world:
        rank3 = world.run(program)[3]
    assert {name: rank3[name] for name in ("world", "tp", "pp", "dp", "ep")} == {
        "world": [0, 1, 2, 3],
        "tp": [2, 3],
        "pp": [1, 3],
        "dp": [3],
        "ep": [2, 3],
    }
    assert {f"{name}.cpu" for name in ("world", "tp", "pp", "dp", "ep", "dcp", "pcp")} < set(rank3)


def test_a_world_leaves_the_process_as_it_was(fold, capfd: pytest.CaptureFixture[str]) -> None:
    import os

    stdout, threads = os.fstat(1), threading.active_count()
    fold("tp4pp2", dtype=torch.bfloat16, tokens=5)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert threading.active_count() == threads
    assert os.fstat(1) == stdout
    assert capfd.readouterr() == ("", "")


def test_topologies_it_cannot_run_are_refused_in_a_line() -> None:
    for word, message in [
        ("tp3", "tp3: 8 query heads do not divide by 3; use tp1, tp2, tp4 or tp8"),
        ("dep3", "ep3: 16 experts do not divide by 3; use ep1, ep2, ep4, ep8 or ep16"),
        (
            "dp64",
            "dp64tp1: 32 expert FFN features do not divide by its 64 ranks, over which vLLM "
            "slices an expert; use fewer, or expert parallelism (dep, tep)",
        ),
    ]:
        with pytest.raises(ShapeError) as caught:
            check(TinyM3(), Topology.parse(word))
        assert str(caught.value) == message


def test_a_wrong_topology_fails_before_any_group_is_made(vllm_ready: None) -> None:
    tiny = TinyM3()
    with World("tp3", rank_local=RANK_LOCAL) as world, pytest.raises(RankFailed, match="tp3: 8"):
        world.run(Subject, tiny, checkpoint(tiny, 0, torch.float32))
