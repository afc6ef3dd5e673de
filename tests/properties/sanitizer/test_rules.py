"""Each rule names the wrong program, and leaves its right twins alone."""

import inspect

import pytest
import torch
import torch.distributed as dist

from properties.sanitizer import RULES, Allow, AllowError, Finding, Sanitizer
from sim import RankContext, World
from tests.properties.sanitizer import crossed, programs
from tests.properties.sanitizer.programs import RIGHT, WRONG, Program


def watched(program: Program, world: str = "tp2", allow: tuple[Allow, ...] = ()) -> Sanitizer:
    sanitizer = Sanitizer(allow)
    with World(world, observers=[sanitizer]) as folded:
        folded.run(program)
    return sanitizer


def line_of(program: Program, text: str, nth: int = 0) -> str:
    """`programs.py:N` of the nth line of the program that holds the text."""
    lines, start = inspect.getsourcelines(program)
    found = [start + i for i, line in enumerate(lines) if text in line]
    return f"programs.py:{found[nth]}"


def test_every_rule_has_a_wrong_program() -> None:
    elsewhere = {*crossed.WRONG, "not replicated"}
    assert {*WRONG, *elsewhere} == {rule.name for rule in RULES}


@pytest.mark.parametrize("world", ["tp2", "tp4"])
@pytest.mark.parametrize(
    ("rule", "program"), [(rule, program) for rule, some in WRONG.items() for program in some]
)
def test_a_wrong_program_is_found_by_its_rule_alone(
    rule: str, program: Program, world: str
) -> None:
    sanitizer = watched(program, world)
    assert [finding.rule for finding in sanitizer.findings] == [rule]
    assert not sanitizer.ok
    (finding,) = sanitizer.findings
    assert "programs.py:" in finding.site
    assert finding.site in finding.where
    assert finding.ranks == tuple(range(int(world[2:])))


@pytest.mark.parametrize("world", ["tp2", "tp4"])
@pytest.mark.parametrize("program", RIGHT)
def test_a_right_program_is_left_alone(program: Program, world: str) -> None:
    assert watched(program, world).findings == []


def test_a_sum_of_sums_over_two_groups_is_left_alone() -> None:
    """dp2tp2: summed over tp, then over all: ranks of different tp groups hold different sums."""
    assert watched(programs.sum_of_the_sum_over_another_group, "dp2tp2").findings == []


@pytest.mark.parametrize(
    "program",
    [p for some in WRONG.values() for p in some if p is not programs.gathers_whole_list],
)
def test_one_rank_has_nothing_to_do_twice(program: Program) -> None:
    assert watched(program, "tp1").findings == []


def test_both_lines_and_the_factor_are_named() -> None:
    program = programs.double_all_reduce
    (finding,) = watched(program, "tp4").findings
    first, second = (line_of(program, "all_reduce(", nth) for nth in (1, 2))
    assert first in finding.what and "4 times" in finding.what
    assert second in finding.where
    assert "all_reduce(sum) float32[4, 8]" in finding.where
    assert "4 x" in finding.why


def test_an_input_made_whole_by_a_gather_says_so() -> None:
    (finding,) = watched(programs.reduced_again_after_scatter_and_gather).findings
    assert line_of(programs.gathered, "all_gather_into_tensor") in finding.why


def test_a_loop_is_one_finding_with_its_count() -> None:
    (finding,) = watched(programs.gathers_whole_each_time).findings
    assert finding.times == 2
    assert finding.where.endswith("2 times")


def test_coalesced_operands_are_judged_one_by_one() -> None:
    def program(ctx: RankContext) -> None:
        good, bad = programs.own(ctx, 4, 8), programs.common(4, 8)
        dist.all_reduce_coalesced([good, bad])

    (finding,) = watched(program).findings
    assert finding.rule == "equal addends"
    assert finding.times == 1


def test_one_bit_on_one_rank_is_a_difference() -> None:
    def program(ctx: RankContext) -> None:
        x = programs.common(4, 8)
        if ctx.rank == 3:
            x.view(torch.int32)[3, 7] ^= 1
        dist.all_reduce(x)

    assert watched(program, "tp4").findings == []


def test_a_nan_equals_itself() -> None:
    def program(ctx: RankContext) -> None:
        x = programs.common(4, 8)
        x[0, 0] = torch.nan
        dist.all_reduce(x)

    assert [f.rule for f in watched(program).findings] == ["equal addends"]


def test_operands_of_any_mode_are_read_and_not_changed() -> None:
    def program(ctx: RankContext) -> torch.Tensor:
        with torch.inference_mode():
            x = programs.common(8, 4).t()
            dist.all_reduce(x)
        y = programs.common(4, 8).requires_grad_()
        gathered = [torch.empty(4, 8) for _ in range(2)]
        dist.all_gather(gathered, y)
        return x

    sanitizer = Sanitizer()
    with World("tp2", observers=[sanitizer]) as world:
        seen = world.run(program)
    with World("tp2") as world:
        alone = world.run(program)
    assert all(torch.equal(a, b) for a, b in zip(seen, alone, strict=True))
    assert [f.rule for f in sanitizer.findings] == ["equal addends", "gathers what is whole"]


def test_clear_forgets() -> None:
    sanitizer = Sanitizer()
    with World("tp2", observers=[sanitizer]) as world:
        world.run(programs.double_all_reduce)
        assert not sanitizer.ok
        sanitizer.clear()
        assert sanitizer.ok
        world.run(programs.single_all_reduce)
    assert sanitizer.findings == []


# --- allowed sites ---

REASON = "a drill: the factor is divided out below"


def allowed(site: str, rule: str = "reduced again") -> Finding:
    allow = Allow(rule=rule, site=site, reason=REASON)
    (finding,) = watched(programs.double_all_reduce, allow=(allow,)).findings
    return finding


@pytest.mark.parametrize("form", ["{line}", "sanitizer/{line}", "programs.py"])
def test_an_allowed_finding_is_kept_with_its_reason(form: str) -> None:
    site = form.format(line=line_of(programs.double_all_reduce, "all_reduce(", 2))
    assert allowed(site).allowed == REASON


def test_an_allowed_finding_is_no_failure() -> None:
    allow = Allow(rule="reduced again", site="programs.py", reason=REASON)
    assert watched(programs.double_all_reduce, allow=(allow,)).ok


@pytest.mark.parametrize(
    ("site", "rule"),
    [
        ("programs.py:1", "reduced again"),
        ("grams.py", "reduced again"),
        ("other/programs.py", "reduced again"),
        ("programs.py", "equal addends"),
    ],
)
def test_another_site_or_rule_is_not_allowed(site: str, rule: str) -> None:
    assert allowed(site, rule).allowed is None


def test_an_allow_needs_a_rule_and_a_reason() -> None:
    with pytest.raises(AllowError, match="use reduced again, equal addends"):
        Sanitizer([Allow(rule="reduced agian", site="a.py", reason="typo")])
    with pytest.raises(AllowError, match="a reason"):
        Allow(rule="reduced again", site="a.py", reason=" ")
