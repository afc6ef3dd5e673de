"""Under poison right code computes the same bits, and a leak is found at the first tap it shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.subject import prepare
from model.tiny import TinyM3
from properties import Verdict
from properties.poison import no_poison, poisoned
from sim import RankContext, Topology, World
from tests.properties.captures import Tap, captured, full, with_rows
from tests.properties.stepping import MEGA, MXFP8, PLAIN, Built, Shared, built

TOKENS = (0, 1, 2, 3, 5, 7, 8, 9)


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    prepare()


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    worlds = Shared()
    yield worlds
    worlds.close()


def taps(subject: Built, tokens: int, *, poison: bool) -> list[Any]:
    batch = subject.random(tokens, sequences=2 if tokens > 3 else 1)
    if poison:
        with poisoned():
            return [result.taps for result in subject.step(batch)]
    return [result.taps for result in subject.step(batch)]


CASES = [
    *((word, PLAIN, True) for word in ("tp2", "tep2", "tp2pp2", "tep2pp2", "tep4pp2")),
    *((word, MEGA, sp) for word in ("tep2", "tep2pp2", "tep4pp2") for sp in (True, False)),
    ("tep2", MXFP8, True),
    ("tep4", MXFP8, False),
]


@pytest.mark.parametrize(
    ("word", "tiny", "sp"),
    CASES,
    ids=[f"{word}-{getattr(tiny, 'expert_dtype', 'plain')}-{sp}" for word, tiny, sp in CASES],
)
def test_right_code_gives_the_same_bits(shared: Shared, word: str, tiny: TinyM3, sp: bool) -> None:
    aux = (0, 2) if "pp" in word else ()
    subject = shared.of(word, tiny, sp=sp, aux=aux)
    topology = Topology.parse(word)
    for tokens in TOKENS:
        poison = taps(subject, tokens, poison=True)
        plain = taps(subject, tokens, poison=False)
        for verdict in (
            no_poison(topology, tokens, poison),
            no_poison(topology, tokens, poison, plain),
        ):
            assert verdict.ok, (tokens, verdict)


def test_it_is_really_there_and_ends() -> None:
    makers = (torch.empty, torch.empty_like, torch.nn.functional.pad, torch.Tensor.new_empty)
    with poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.empty(2, dtype=torch.float8_e4m3fn).isnan().all()
        assert torch.empty_like(torch.ones(2, 2)).isnan().all()
        assert torch.empty_strided((2, 2), (1, 2)).isnan().all()
        assert torch.ones(2).new_empty(2, dtype=torch.bfloat16).isnan().all()
        assert torch.nn.Parameter(torch.empty(2)).isnan().all()
        assert torch.empty(2, requires_grad=True).isnan().all()
        assert (torch.empty(2, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
        rows = torch.nn.functional.pad(torch.ones(3, 2), (0, 0, 0, 1))
        assert rows[:3].eq(1).all() and rows[3].isnan().all()
    after = (torch.empty, torch.empty_like, torch.nn.functional.pad, torch.Tensor.new_empty)
    assert after == makers
    assert "new_empty" not in vars(torch.Tensor)


@pytest.mark.parametrize(
    ("value", "pads", "options"),
    [
        (torch.ones(3, 2), (0, 1, 0, 0), {}),  # features
        (torch.ones(3, 2), (0, 0, 1, 0), {}),  # rows in front
        (torch.ones(3, 2), (0, 0, 0, 1), {"value": 1.0}),
        (torch.ones(3, dtype=torch.bool), (0, 1), {"value": True}),
        (torch.ones(3, 2, dtype=torch.int64), (0, 0, 0, 1), {}),
        (torch.ones(3, 2), (0, 0, 0, -1), {}),
    ],
)
def test_other_pads_stay_as_they_are(value: torch.Tensor, pads: Any, options: Any) -> None:
    before = torch.nn.functional.pad(value, pads, **options)
    with poisoned():
        after = torch.nn.functional.pad(value, pad=pads, **options)
    assert torch.equal(before, after)


def fails(verdict: Verdict, at: str, where: str, why: str) -> None:
    assert not verdict.ok
    assert (verdict.name, verdict.kind, verdict.at) == ("poison", "poison", at)
    assert verdict.where == f"{at}, {where}"
    assert why in verdict.why


# --- faults in vLLM's running code ---


@pytest.mark.parametrize("end", ["right", "wrong"])
def test_a_gather_that_cuts_off_the_wrong_end(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    from model.overlay import layers

    def gather(shard: torch.Tensor, num_tokens: int) -> torch.Tensor:
        whole = layers.sp_all_gather(shard)
        start = whole.shape[0] - num_tokens if end == "wrong" else 0
        return whole.narrow(0, start, num_tokens)

    from vllm.models.common.ops.sequence_parallel import sp_all_gather

    monkeypatch.setattr(layers, "sp_all_gather", sp_all_gather, raising=False)
    monkeypatch.setattr(layers, "gather_tokens", gather)
    with built("tep2pp2", MEGA) as subject:
        even, odd = (
            no_poison(Topology.parse("tep2pp2"), tokens, taps(subject, tokens, poison=True))
            for tokens in (4, 5)
        )
    assert even.ok  # no pads, no leak
    if end == "right":
        assert odd.ok
    else:
        # The last row of attention's input is then a pad row; it is in the second sequence.
        fails(odd, "layers.0.attn", "ranks [0, 1], rows 3, 4 of 5", "after embed")


@pytest.mark.parametrize("copied", [True, False])
def test_a_receive_buffer_that_is_not_written(
    monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    from vllm.distributed.parallel_state import GroupCoordinator

    receive = GroupCoordinator.recv_tensor_dict

    def into_buffers(self: Any, *args: Any, **kwargs: Any) -> Any:
        received = receive(self, *args, **kwargs)
        buffers = {key: torch.empty_like(value) for key, value in received.items()}
        for key, value in received.items():
            if copied or key != "residual":
                buffers[key].copy_(value)
        return buffers

    monkeypatch.setattr(GroupCoordinator, "recv_tensor_dict", into_buffers)
    with built("tp2pp2") as subject:
        verdict = no_poison(Topology.parse("tp2pp2"), 3, taps(subject, 3, poison=True))
    if copied:
        assert verdict.ok
    else:
        at = "stage.1.recv.residual"
        fails(verdict, at, "ranks [2, 3], rows 0, 1, 2 of 3", "after stage.1.recv.hidden_states")


@pytest.mark.parametrize("cleared", ["by selection", "by a product with zero"])
def test_pads_of_an_uneven_gather(cleared: str) -> None:
    """Ranks with fewer rows gather a buffer that they have not filled; a mask clears the rest."""
    rows = (3, 1)

    def program(ctx: RankContext) -> dict[str, Tap]:
        own = torch.empty(3, 2)
        own[: rows[ctx.rank]] = 1.0
        gathered = torch.empty(6, 2)
        dist.all_gather_into_tensor(gathered, own)
        real = torch.tensor([True] * 3 + [True, False, False]).unsqueeze(1)
        clean = torch.where(real, gathered, 0.0) if "selection" in cleared else gathered * real
        return {"gathered": Tap(gathered[:4]), "total": Tap(clean.sum(0, keepdim=True))}

    with World("tp2") as world, poisoned():
        verdict = no_poison(Topology.parse("tp2"), 4, world.run(program))
    if cleared == "by selection":
        assert verdict.ok
    else:
        fails(verdict, "total", "ranks [0, 1], rows 0 of 4", "after gathered")


# --- the judgement itself ---

NAN = float("nan")


def test_pad_rows_of_a_shard_may_be_poison() -> None:
    pads = captured("tap", full(2), with_rows(full(2), [1], NAN), declared="shard:tp")
    assert no_poison(Topology.parse("tp2"), 3, pads).ok
    verdict = no_poison(Topology.parse("tp2"), 4, pads)
    fails(verdict, "tap", "ranks [1], rows 3 of 4", "before the first tap")


def test_nan_that_was_there_without_poison_is_none() -> None:
    value = captured("tap", with_rows(full(), [2], NAN), with_rows(full(), [2], NAN))
    assert no_poison(Topology.parse("tp2"), 4, value, value).ok
    assert not no_poison(Topology.parse("tp2"), 4, value).ok


def test_integers_are_compared_with_the_plain_run() -> None:
    chosen, other = torch.tensor([[1, 2]]), torch.tensor([[1, 3]])
    poison, plain = captured("ids", chosen, other), captured("ids", chosen, chosen)
    assert no_poison(Topology.parse("tp2"), 1, poison).ok
    verdict = no_poison(Topology.parse("tp2"), 1, poison, plain)
    fails(verdict, "ids", "ranks [1], rows 0 of 1", "before the first tap")
