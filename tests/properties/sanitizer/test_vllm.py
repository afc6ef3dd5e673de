"""The sanitizer is silent on vLLM's MiniMax-M3 as it is, and speaks when a reduction is doubled."""

from typing import Any

import pytest
import torch

from model.batch import Batch
from model.rank_state import RANK_LOCAL
from model.subject import prepare
from properties.sanitizer import Sanitizer
from rankfold.options import Options
from rankfold.run import PLUMBING, build, full_checkpoint
from sim import Ledger, Topology, World

MEGA = "deep_gemm_mega_moe"
CASES = [(word, "auto", "auto") for word in ("tp2", "tp4", "tp2pp2", "tep4pp2")]
CASES += [(word, MEGA, sp) for word in ("tep2pp2", "tep4pp2") for sp in ("auto", "off")]


def step(
    word: str, backend: str, sp: str, tokens: int, batch: Batch | None = None
) -> tuple[Sanitizer, Ledger]:
    """One watched step, the building of the model included, and the step's ledger.

    A rig forgets what was found before a step, so this is a world of its own.
    """
    prepare()
    topology = Topology.parse(word)
    options = Options(topology=topology, moe_backend=backend, sp=sp, aux=(1, 3))
    batch = batch or Batch.random(tokens, options.tiny.vocab_size, 0, 1)
    sanitizer = Sanitizer()
    weights = full_checkpoint(options)
    observed = {"rank_local": RANK_LOCAL, "plumbing": PLUMBING, "observers": [sanitizer]}
    with World(topology, **observed) as world:
        subjects = world.run(build, options, weights)
        world.ledger.clear()
        world.run(lambda ctx: subjects[ctx.rank].step(batch) and None)
        return sanitizer, world.ledger


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize(("word", "backend", "sp"), CASES)
def test_vllm_as_it_is_gives_no_finding(word: str, backend: str, sp: str, tokens: int) -> None:
    sanitizer, ledger = step(word, backend, sp, tokens)
    assert {"all_reduce", "all_gather_into_tensor"} & {e.op for e in ledger.entries}
    assert sanitizer.findings == []


@pytest.mark.parametrize("tokens", [4, 8])
def test_a_warm_up_on_one_repeated_token_gives_no_finding(tokens: int) -> None:
    """Token shards are equal on all ranks then, by their data."""
    batch = Batch.of(torch.full((tokens,), 3), (tokens,))
    sanitizer, _ = step("tep4pp2", MEGA, "auto", tokens, batch)
    assert sanitizer.findings == []


@pytest.mark.parametrize("word", ["tp2", "tp2pp2"])
def test_a_dense_output_reduced_twice_is_found(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare()
    import vllm.models.minimax_m3.nvidia.model as m3
    from vllm.distributed import tensor_model_parallel_all_reduce

    forward = m3.MiniMaxM3MLP.forward

    def twice(self: Any, x: Any) -> Any:
        # Of one stage the layer leaves the reduction to the next norm, of two it does it itself.
        return tensor_model_parallel_all_reduce(forward(self, x))

    monkeypatch.setattr(m3.MiniMaxM3MLP, "forward", twice)
    sanitizer, _ = step(word, "auto", "auto", 5)
    (finding,) = sanitizer.findings
    assert finding.rule == "reduced again"
    assert finding.group == "tp"
    assert finding.ranks == (0, 1)
    assert "test_vllm.py:" in finding.what + finding.where
