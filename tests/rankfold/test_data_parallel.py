"""`rankfold check` where each DP rank has tokens of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from properties import TapVerdict, Verdict
from rankfold.check import run_check
from rankfold.cli import main
from rankfold.data_parallel import batches_of, merged_checks, merged_taps
from rankfold.errors import UsageError
from rankfold.judge import Judgement
from rankfold.options import MEGA_MOE, Options
from rankfold.report import Report
from sim import Topology


def options(word: str, *tokens: int, against: str = "", **more: Any) -> Options:
    if tokens:
        more |= {"tokens": sum(tokens), "dp_tokens": tokens}
    other = Topology.parse(against) if against else None
    return Options(topology=Topology.parse(word), against=other, **more)


def check(word: str, *tokens: int, **more: Any) -> Report:
    return run_check(options(word, *tokens, **more), progress=lambda text: None)


# --- what runs ---


@pytest.mark.parametrize(
    ("word", "tokens", "spread"),
    [
        ("dp2", 8, (2, 6)),
        ("dep4", 8, (0, 2, 2, 4)),
        ("dep4", 0, (0, 0, 0, 0)),
        ("dep4", 1, (0, 0, 1, 0)),
    ],
)
def test_one_number_is_spread_unevenly(word: str, tokens: int, spread: tuple[int, ...]) -> None:
    assert options(word, tokens=tokens).tokens_by_dp_rank == spread


def test_spread_tokens_are_all_there() -> None:
    for ranks in (2, 3, 8, 16):
        for tokens in range(40):
            spread = options(f"dep{ranks}", tokens=tokens).tokens_by_dp_rank
            assert len(spread) == ranks and sum(spread) == tokens and min(spread) >= 0


def test_dp_ranks_have_different_tokens() -> None:
    a, b = batches_of(options("dp2", 6, 6, sequences=3))
    assert not torch.equal(a.token_ids, b.token_ids)
    assert a.seq_lens == b.seq_lens == (2, 2, 2)
    one, none = batches_of(options("dp2", 1, 0, tokens=1, sequences=1))
    assert (one.seq_lens, none.seq_lens) == ((1,), (0,))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["dp2", "--tokens", "1,2,3"], "--tokens with 3 numbers: dp2 has 2 DP ranks; give one"),
        (["tp2", "--tokens", "1,2"], "--tokens with 2 numbers: tp2 has 1 DP ranks; give one"),
        (["dp2", "--tokens", "5,-1"], "tokens [5, -1]: use 0 or more for each DP rank"),
        (["dp2", "--tokens", "5,x"], "--tokens '5,x': use a number, or one for each DP rank"),
        (["dp2", "--decode", "2", "--tokens", "4"], "--tokens: requests on several DP ranks"),
        (["dp64"], "32 expert FFN features do not divide by its 64 ranks"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_every_expert_parallel_rank_has_an_expert() -> None:
    assert options("dep72").tiny.num_local_experts == 72
    assert options("dep16").tiny == options("tep4").tiny
    assert options("tp2", against="dep32").tiny.num_local_experts == 32


# --- how verdicts are put together ---


def verdict(name: str, ok: bool = True, at: str = "", what: str = "fine") -> Verdict:
    return Verdict(name=name, ok=ok, what=what, where=at, why="because", kind="k", at=at)


def tap(name: str, ok: bool = True) -> TapVerdict:
    return TapVerdict(name=name, ok=ok, expected="Replicate", max_abs_err=0.0, bound=1.0)


def test_taps_stand_in_program_order_with_all_dp_ranks_together() -> None:
    merged = merged_taps([[tap("embed"), tap("norm")], [tap("embed"), tap("norm", ok=False)]])
    assert [t.name for t in merged] == ["dp0.embed", "dp1.embed", "dp0.norm", "dp1.norm"]
    assert [t.ok for t in merged] == [True, True, True, False]


def test_the_first_violation_in_program_order_is_told() -> None:
    taps = [tap("embed"), tap("norm"), tap("logits")]
    late = Judgement(checks=[verdict("oracle", False, "logits", "late")], taps=taps)
    early = Judgement(checks=[verdict("oracle", False, "norm", "early")], taps=taps)
    right = Judgement(checks=[verdict("oracle")], taps=taps)
    [merged] = merged_checks([late, right, early], [3, 3, 3])
    assert not merged.ok
    assert (merged.what, merged.at, merged.where) == (
        "DP rank 2: early",
        "dp2.norm",
        "dp2.norm",
    )
    assert merged.why == "because; also on DP ranks [0]"


def test_what_holds_everywhere_is_told_once() -> None:
    both = [Judgement(checks=[verdict("oracle"), verdict("ledger")], taps=[]) for _ in range(2)]
    oracle, ledger = merged_checks(both, [3, 0])
    assert (oracle.what, ledger.what) == ("fine (each of 2 DP ranks)", "fine")


def test_a_check_of_all_ranks_at_once_is_not_of_one_dp_rank() -> None:
    wrong = verdict("sanitizer", False, "all_reduce", "twice")
    [merged] = merged_checks([Judgement(checks=[wrong], taps=[])] * 2, [3, 3])
    assert merged == wrong


# --- on the real model ---

HOLDS = [
    ("dp2", (5, 5), {}),
    ("dp2tp2", (3, 0), {"sequences": 2}),
    ("dp2tep2", (1, 6), {"attention": "model", "sequences": 2}),
    ("dep4", (0, 1, 7, 2), {"dtype": "bfloat16"}),
    ("dp2tp2pp2", (4, 1), {}),
    ("dep2", (0, 0), {}),
    ("dp2tep2", (0, 5), {"moe_backend": MEGA_MOE}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "tokens", "more"), HOLDS)
def test_every_check_holds(word: str, tokens: tuple[int, ...], more: dict[str, Any]) -> None:
    report = check(word, *tokens, **more)
    assert report.ok, report.headline
    assert report.tokens_by_dp_rank == list(tokens)
    names = {check.name for check in report.checks}
    assert {
        "parameters",
        "aliasing",
        "routing",
        "poison",
        "oracle",
        "replication",
        "ledger",
    } < names
    degree = len(tokens)
    for name in ("dp0.embed", f"dp{degree - 1}.logprobs"):
        assert name in {tap.name for tap in report.taps}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"moe_backend": MEGA_MOE}])
def test_sixteen_dp_ranks(more: dict[str, Any]) -> None:
    report = check("dep16", layers="dm", tokens=24, **more)
    assert report.ok, report.headline
    assert 0 in report.tokens_by_dp_rank and 1 in report.tokens_by_dp_rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "against", "exact"),
    [("dp2tp2pp2", "dp2tp2", True), ("dep4", "dep2", False), ("dep4", "tp2", False)],
)
def test_against_another_deployment(word: str, against: str, exact: bool) -> None:
    degree = Topology.parse(word).dp
    report = check(word, *(3, 0, 2, 5)[:degree], against=against, layers="dm")
    assert report.ok, report.headline
    assert report.against is not None
    if exact:
        assert report.against.max_abs_delta == report.against.bound == 0
    else:
        assert report.against.max_abs_delta <= report.against.bound < 1e-2


def test_json_says_whose_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dp2", "--tokens", "2,0", "--layers", "m", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["tokens_by_dp_rank"]) == (2, [2, 0])


def test_a_table_has_each_tap_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dp2", "--tokens", "2,3", "--layers", "m"]) == 0
    out = capsys.readouterr().out
    assert "5 tokens on DP ranks (2, 3)" in out
    assert out.count("layers.0.ffn") == 1


def test_usage_errors_name_the_option() -> None:
    with pytest.raises(UsageError, match="DP ranks"):
        options("dp2", requests=2)
