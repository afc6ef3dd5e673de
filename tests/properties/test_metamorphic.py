"""Rows that mean the same stay on right code, and code that mixes rows is found where it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from model.batch import Batch
from model.checkpoint import checkpoint
from model.megamoe.tiny import MegaTinyM3
from model.subject import prepare
from model.tiny import TinyM3
from properties import Placement, Verdict
from properties.metamorphic import Taps, rows_stay
from properties.relations import Relation, batch_split, sequences_reordered, tokens_changed
from sim import Topology
from tests.properties.captures import captured, full
from tests.properties.stepping import MEGA, PLAIN, Built, Shared, built


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    prepare()


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    worlds = Shared()
    yield worlds
    worlds.close()


def run(subject: Built, batch: Batch) -> list[Any]:
    return [result.taps for result in subject.step(batch)]


def bounds_of(subject: Built, batch: Batch, taps: Taps) -> Mapping[str, float]:
    """The reference's bounds, following the run's routing."""
    topology = Topology.parse(subject.word)
    routing = {}
    for layer in subject.tiny.moe_layers:
        name = f"layers.{layer}.experts_chosen"
        local = {rank: of_rank[name] for rank, of_rank in enumerate(taps) if name in of_rank}
        placement = Placement.parse(next(iter(local.values())).declared)
        values = {rank: tap.value for rank, tap in local.items()}
        whole = placement.full_values(topology, values, batch.tokens)
        routing[layer] = next(iter(whole.values())).long()
    dtype = torch.bfloat16 if isinstance(subject.tiny, MegaTinyM3) else torch.float32
    config = reference.M3Config.from_hf(subject.tiny.text_config())
    weights = checkpoint(subject.tiny, 0, dtype)
    named = {name.removeprefix("model."): weight for name, weight in weights.items()}
    return reference.bounds(
        config,
        reference.as_float64(config, named),
        reference.Batch(
            token_ids=batch.token_ids, positions=batch.positions, seq_lens=batch.seq_lens
        ),
        dtype=dtype,
        ranks=topology.tp,
        routing=routing,
    ).taps


def judge(subject: Built, relation: Relation, *, bounded: bool) -> Verdict:
    base, *derived = (run(subject, batch) for batch in (relation.base, *relation.derived))
    batches = zip((relation.base, *relation.derived), (base, *derived), strict=True)
    return rows_stay(
        relation,
        Topology.parse(subject.word),
        base,
        derived,
        grouped_experts=isinstance(subject.tiny, MegaTinyM3),
        bounds=[bounds_of(subject, batch, taps) for batch, taps in batches] if bounded else None,
    )


def of_lengths(tiny: TinyM3, *lengths: int, seed: int = 0) -> Batch:
    ids = Batch.random(sum(lengths), tiny.vocab_size, seed).token_ids
    return Batch.of(ids, lengths)


# --- right code ---

WORDS = [("tp1", PLAIN), ("tep2", PLAIN), ("tp4pp2", PLAIN), ("tep2pp2", PLAIN)]
WORDS += [("tep2", MEGA), ("tep4pp2", MEGA)]
LENGTHS = st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(lambda ls: sum(ls) > 0)


@pytest.mark.parametrize(("word", "tiny"), WORDS, ids=lambda v: getattr(v, "hidden_size", v))
@settings(max_examples=10)
@given(lengths=LENGTHS, seed=st.integers(0, 99), data=st.data())
def test_rows_keep_their_bits_when_others_change(
    shared: Shared, word: str, tiny: TinyM3, lengths: list[int], seed: int, data: Any
) -> None:
    subject = shared.of(word, tiny)
    batch = of_lengths(tiny, *lengths, seed=seed)
    relation = tokens_changed(batch, data.draw(st.integers(0, batch.tokens - 1)), tiny.vocab_size)
    verdict = judge(subject, relation, bounded=False)
    assert verdict.ok, verdict
    assert "keep the bits of the other rows" in verdict.what
    assert ("not compared" in verdict.what) == (tiny is MEGA)


@pytest.mark.parametrize(("word", "tiny"), WORDS, ids=lambda v: getattr(v, "hidden_size", v))
@settings(max_examples=4)
@given(lengths=LENGTHS, seed=st.integers(0, 99), data=st.data())
def test_rows_stay_within_rounding(
    shared: Shared, word: str, tiny: TinyM3, lengths: list[int], seed: int, data: Any
) -> None:
    subject = shared.of(word, tiny)
    batch = of_lengths(tiny, *lengths, seed=seed)
    relation = data.draw(
        st.one_of(
            st.permutations(range(len(lengths))).map(lambda o: sequences_reordered(batch, o)),
            st.integers(1, len(lengths) - 1).map(lambda at: batch_split(batch, at)),
            st.integers(0, batch.tokens - 1).map(
                lambda row: tokens_changed(batch, row, tiny.vocab_size)
            ),
        )
    )
    verdict = judge(subject, relation, bounded=True)
    assert verdict.ok, verdict
    assert "within rounding" in verdict.what or (relation.in_place and tiny is PLAIN)


# --- faults in vLLM's running code, each with a twin that is right ---


def fails(verdict: Verdict, at: str, where: str) -> None:
    assert not verdict.ok
    assert (verdict.name, verdict.kind) == ("metamorphic", "depends on other rows")
    assert verdict.at == at
    assert verdict.where == f"{at}, {where}"


@pytest.mark.parametrize("wrong", [True, False])
def test_a_sequence_that_reads_anothers_keys(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """The block table of the first sequence for all; the twin has a copy of the right one."""
    from model import attention_backend

    kernel = attention_backend.paged_attention

    def attend(q: Any, cache: Any, table: torch.Tensor, *args: Any) -> None:
        kernel(q, cache, table[:1].expand_as(table) if wrong else table.clone(), *args)

    monkeypatch.setattr(attention_backend, "paged_attention", attend)
    with built("tep2pp2") as subject:
        relation = tokens_changed(of_lengths(PLAIN, 3, 3), 1, PLAIN.vocab_size)
        verdict = judge(subject, relation, bounded=False)
    if wrong:
        fails(verdict, "layers.0.attn", "ranks [0, 1], rows 4, 5 of 6")
    else:
        assert verdict.ok


@pytest.mark.parametrize("wrong", [True, False])
def test_a_token_that_sees_the_next_one(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """Each token attends alone, to one token too many; the twin to those up to its own."""
    from model import attention_backend

    kernel = attention_backend.paged_attention

    def attend(q: Any, cache: Any, table: Any, lens: Any, new: Any, scale: Any, out: Any) -> None:
        row = 0
        for i, (length, count) in enumerate(zip(lens, new, strict=True)):
            for position in range(length - count, length):
                seen = min(length, position + (2 if wrong else 1))
                one = slice(row, row + 1)
                kernel(q[one], cache, table[i : i + 1], [seen], [1], scale, out[one])
                row += 1

    monkeypatch.setattr(attention_backend, "paged_attention", attend)
    with built("tp2") as subject:
        relation = tokens_changed(of_lengths(PLAIN, 1, 4), 4, PLAIN.vocab_size)
        verdict = judge(subject, relation, bounded=False)
    if wrong:
        fails(verdict, "layers.0.attn", "ranks [0, 1], rows 3 of 5")
    else:
        assert verdict.ok


@pytest.mark.parametrize("wrong", [True, False])
def test_one_rank_whose_logits_follow_other_rows(
    monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """Rank 0 takes its mean over all rows; the twin over each row's features."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    forward = LogitsProcessor.forward

    def centred(self: Any, head: Any, hidden: torch.Tensor, *args: Any, **kw: Any) -> Any:
        from vllm.distributed import get_tensor_model_parallel_rank as tp_rank

        logits = forward(self, head, hidden, *args, **kw)
        if tp_rank() == 0:
            logits = logits - 1e-6 * (logits.mean() if wrong else logits.mean(-1, keepdim=True))
        return logits

    monkeypatch.setattr(LogitsProcessor, "forward", centred)
    with built("tp2pp2") as subject:
        relation = tokens_changed(of_lengths(PLAIN, 2, 2), 2, PLAIN.vocab_size)
        verdict = judge(subject, relation, bounded=False)
    if wrong:
        fails(verdict, "logits", "ranks [2], rows 0, 1 of 4")
    else:
        assert verdict.ok


@pytest.mark.parametrize("wrong", [True, False])
def test_a_path_for_few_rows(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """Up to two rows go another way: it forgets a scale, or computes the same row by row."""
    import vllm.models.minimax_m3.nvidia.model as m3

    forward = m3.MiniMaxM3MLP.forward

    def by_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2 or "shared" in self.down_proj.prefix or not x.shape[0]:
            return forward(self, x)
        return torch.cat([forward(self, row) for row in x.split(1)]) * (1.01 if wrong else 1.0)

    monkeypatch.setattr(m3.MiniMaxM3MLP, "forward", by_rows)
    with built("tep2") as subject:
        verdict = judge(subject, batch_split(of_lengths(PLAIN, 3, 2), 1), bounded=True)
    if wrong:
        fails(verdict, "layers.0.ffn", "ranks [0, 1], rows 3, 4 of 5")
    else:
        assert verdict.ok


@pytest.mark.parametrize("wrong", [True, False])
def test_rows_that_go_by_their_place(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """RoPE takes a row's place in the batch for its position; the twin copies the positions."""
    import vllm._custom_ops as ops

    kernel = ops.fused_minimax_m3_qknorm_rope_kv_insert

    def placed(qkv: Any, q: Any, k: Any, cache: Any, positions: Any, *a: Any, **kw: Any) -> None:
        # Attention only sees differences of positions, so the sequence's start has to be broken.
        wrongly = torch.arange(len(positions)) ** 2 % 7
        kernel(qkv, q, k, cache, wrongly if wrong else positions.clone(), *a, **kw)

    monkeypatch.setattr(ops, "fused_minimax_m3_qknorm_rope_kv_insert", placed)
    with built("tp2") as subject:
        relation = sequences_reordered(of_lengths(PLAIN, 3, 2), (1, 0))
        verdict = judge(subject, relation, bounded=True)
    if wrong:
        fails(verdict, "layers.0.attn", "ranks [0, 1], rows 1, 2, 4 of 5")
    else:
        assert verdict.ok


def test_mega_moe_that_mixes_rows_is_found_before_its_experts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Router logits that lean on the whole batch: one bit is enough before the first launch."""
    from model.megamoe import block

    forward = block.GateLinear.forward

    def leaning(self: Any, x: torch.Tensor) -> Any:
        logits, bias = forward(self, x)
        return logits + 1e-6 * logits.mean(), bias

    monkeypatch.setattr(block.GateLinear, "forward", leaning)
    with built("tep2", MEGA) as subject:
        relation = tokens_changed(of_lengths(MEGA, 1, 3), 1, MEGA.vocab_size)
        verdict = judge(subject, relation, bounded=False)
    fails(verdict, "layers.1.router", "ranks [0], rows 0 of 4")


# --- relations, and the judgement itself ---


def test_relations_say_which_rows_are_which() -> None:
    batch = Batch.of([10, 11, 20, 21, 22, 30], (2, 3, 1))
    changed = tokens_changed(batch, 3, 64)
    assert changed.derived[0].token_ids.tolist() == [10, 11, 20, 22, 23, 30]
    assert changed.rows == (((0, 0), (1, 1), (2, 2), (5, 5)),)
    moved = sequences_reordered(batch, (2, 0, 1))
    assert moved.derived[0].token_ids.tolist() == [30, 10, 11, 20, 21, 22]
    assert moved.derived[0].positions.tolist() == [0, 0, 1, 0, 1, 2]
    assert moved.rows == (((5, 0), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5)),)
    first, second = batch_split(batch, 2).derived
    assert (first.seq_lens, second.seq_lens) == ((2, 3), (1,))
    assert batch_split(batch, 2).rows[1] == ((5, 0),)


def test_relations_refuse_what_they_cannot_make() -> None:
    batch = Batch.of([1, 2], (1, 1))
    for make in (
        lambda: tokens_changed(batch, 2, 64),
        lambda: tokens_changed(batch, 0, 1),
        lambda: sequences_reordered(batch, (0, 0)),
        lambda: batch_split(batch, 2),
    ):
        with pytest.raises(ValueError):
            make()


def test_rows_that_change_routing_are_excused_with_what_follows_from_them() -> None:
    """Sequence 0 is rows 0 to 2: its row 1 goes to another expert, row 2 may attend to it."""
    relation = sequences_reordered(Batch.of([1, 2, 3, 4], (3, 1)), (0, 1))
    chosen, other = torch.tensor([[0], [1], [2], [3]]), torch.tensor([[0], [7], [2], [3]])

    def taps(ids: torch.Tensor, value: torch.Tensor) -> list[Any]:
        return [captured("l.experts_chosen", ids)[0] | captured("l.ffn", value)[0]]

    bounds = [{"l.ffn": 0.25}, {"l.ffn": 0.25}]

    def verdict(rows: list[int], by: float, ids: torch.Tensor = other) -> Verdict:
        moved = full()
        moved[rows] += by
        runs = taps(chosen, full()), [taps(ids, moved)]
        return rows_stay(
            relation, Topology.parse("tp1"), *runs, grouped_experts=False, bounds=bounds
        )

    assert verdict([1, 2], 9.0).ok
    assert verdict([0, 3], 0.5).ok
    fails(verdict([0, 1, 3], 0.6), "l.ffn", "ranks [0], rows 0, 3 of 4")
    fails(verdict([1, 2], 9.0, ids=chosen), "l.ffn", "ranks [0], rows 1, 2 of 4")
