"""Messages that differ between TP ranks are a fault; tokens that are sent twice are information."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.subject import prepare
from properties.ledger_rules import dispatched, same_messages
from sim import RankContext, Topology, World
from tests.properties.stepping import MEGA, PLAIN, built


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    prepare()


@pytest.mark.parametrize("tiny", [PLAIN, MEGA], ids=["plain", "mega"])
@pytest.mark.parametrize("tokens", [0, 1, 5, 8])
def test_vllm_sends_the_same_and_every_row_once(tiny: Any, tokens: int) -> None:
    with built("tep2pp2", tiny, aux=(1,)) as subject:
        subject.world.ledger.clear()
        subject.step(subject.random(tokens))
        entries = subject.world.ledger.entries
        verdict = same_messages(Topology.parse("tep2pp2"), entries)
    assert verdict.ok
    # Hidden states, residual and aux of two ranks; vLLM sends no empty tensor.
    assert verdict.what.startswith(f"{6 if tokens else 0} messages")
    assert dispatched(entries, tokens, tiny.num_experts_per_tok) == []


def ledger(word: str, program: Any) -> Any:
    with World(word) as world:
        world.run(program)
        return world.ledger.entries


def test_aux_that_one_tp_rank_alone_sends() -> None:
    def program(ctx: RankContext) -> None:
        peer = (ctx.rank + 2) % 4
        extra = ctx.rank % 2 == 0
        for _ in range(2 + extra):
            value = torch.ones(3)
            dist.send(value, peer) if ctx.rank < 2 else dist.recv(value, peer)

    verdict = same_messages(Topology.parse("tp2pp2"), ledger("tp2pp2", program))
    assert not verdict.ok
    assert (verdict.name, verdict.kind) == ("messages", "messages differ")
    assert verdict.where.startswith("rank 1 to 3, against rank 0 to 2, at ")
    assert "tests/properties/test_ledger_rules.py" in verdict.where
    assert verdict.why.startswith("rank 0 sends 3 and rank 1 sends 2")


def test_messages_in_another_order() -> None:
    def program(ctx: RankContext) -> None:
        peer = (ctx.rank + 2) % 4
        dtypes = [torch.float32, torch.bfloat16]
        for dtype in dtypes if ctx.rank % 2 == 0 else reversed(dtypes):
            value = torch.ones(3, dtype=dtype)
            dist.send(value, peer) if ctx.rank < 2 else dist.recv(value, peer)

    verdict = same_messages(Topology.parse("tp2pp2"), ledger("tp2pp2", program))
    assert not verdict.ok
    assert verdict.why.startswith("message 0 is float32 there and bfloat16 here")


def test_a_rank_that_sends_for_its_peers_and_uneven_slices_are_right() -> None:
    def for_its_peers(ctx: RankContext) -> None:
        value = torch.ones(3)
        if ctx.rank == 0:
            dist.send(value, 2)
        elif ctx.rank == 2:
            dist.recv(value, 0)

    def uneven(ctx: RankContext) -> None:
        value, peer = torch.ones(3 - ctx.rank % 2), (ctx.rank + 2) % 4
        dist.send(value, peer) if ctx.rank < 2 else dist.recv(value, peer)

    for program in (for_its_peers, uneven):
        assert same_messages(Topology.parse("tp2pp2"), ledger("tp2pp2", program)).ok


def test_tokens_that_every_tp_rank_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is whole on both ranks, and neither takes its share: waste by TP, no fault."""
    from model.megamoe.block import MiniMaxM3MegaMoE
    from model.overlay.layers import MiniMaxM3ReplicatedMegaMoE

    monkeypatch.setattr(MiniMaxM3ReplicatedMegaMoE, "forward", MiniMaxM3MegaMoE.forward)
    with built("tep2", MEGA, sp=False) as subject:
        subject.world.ledger.clear()
        subject.step(subject.random(5))
        found = dispatched(subject.world.ledger.entries, 5, MEGA.num_experts_per_tok)
    assert [(d.rows, d.needed, d.factor) for d in found] == [(40, 20, 2.0)] * 4
    assert {d.ranks for d in found} == {(0, 1)}
    assert all("exchange.py" in d.site for d in found)
