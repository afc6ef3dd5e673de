"""What the hunt draws: only what makes sense, all that it should, and the plain first."""

import random
import re

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from rankfold.corpus import LENGTHS, LONGEST, batch_of
from rankfold.errors import UsageError
from rankfold.example import Example
from rankfold.hunt.space import PATTERNS, Space
from rankfold.hunt.tally import DP_WORDS, Tally, dp_word, token_class
from rankfold.hunt.topologies import DEGREES, all_topologies
from rankfold.options import MEGA_MOE
from rankfold.relate import RELATIONS
from sim import Topology

SPACE = Space.of()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(SPACE.examples())
def test_every_example_makes_sense(example: Example) -> None:
    options = example.options()
    assert options.topology.world_size <= 8
    assert len(example.layers) >= options.topology.pp
    assert sum(example.seq_lens) == example.tokens <= LONGEST
    assert all(length > 0 for length in example.seq_lens) or example.tokens == 0
    assert example.batch().tokens == example.tokens
    batches = example.batches()
    assert len(batches) == options.topology.dp
    assert tuple(batch.tokens for batch in batches) == options.tokens_by_dp_rank


def test_all_topologies_have_up_to_eight_ranks_and_each_kind() -> None:
    words = {topology.word for topology in all_topologies()}
    assert {"tp1", "tp2", "tp4", "tp8", "pp2", "pp8", "tp2pp2", "tep2pp2", "tep4pp2"} <= words
    assert len(words) == len(all_topologies()) == 16
    sizes = [topology.world_size for topology in all_topologies()]
    assert sizes == sorted(sizes) and sizes[-1] == 8


def test_dp_ranks_come_with_all_others_axes() -> None:
    found = all_topologies(replicas=DEGREES)
    words = {topology.word for topology in found if topology.dp > 1}
    assert {"dp2", "dep2", "dep8", "dp2tp2", "dp2tep2", "dp4tp2", "dep2pp2", "dp2tp2pp2"} <= words
    assert all(topology.world_size <= 8 for topology in found)
    assert [t for t in found if t.dp == 1] == all_topologies() == found[:16]


def test_tokens_lie_over_dp_ranks_in_every_way() -> None:
    drawn: set[str] = set()

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(Space.of([Topology.parse("dep2")]).examples())
    def draw(example: Example) -> None:
        drawn.add(dp_word([batch.tokens for batch in example.batches()]))
        assert not example.in_steps and example.relation in ("", RELATIONS[0])

    draw()
    assert drawn == {*DP_WORDS}
    assert dp_word([4]) == "one rank"


def test_dp_ranks_have_different_texts() -> None:
    """Equal shards would look like what is whole on every rank."""
    found = [batch_of((6, 2), 256, dp_rank) for dp_rank in range(8)]
    assert len({*found}) == 8 and found[0] == batch_of((6, 2), 256)


def test_what_fails_on_dp_ranks_shrinks_to_few_of_them() -> None:
    found = find(
        SPACE.examples(),
        lambda example: len(example.dp_seqs) > 1 and example.tokens > 1,
        settings=settings(database=None, phases=(Phase.generate, Phase.shrink)),
    )
    assert (found.topology, found.tokens) == ("dp2", 2)


def test_what_is_found_shrinks_to_the_plainest() -> None:
    found = find(
        SPACE.examples(),
        lambda example: Topology.parse(example.topology).tp > 1 and example.tokens > 2,
        settings=settings(database=None, phases=(Phase.generate, Phase.shrink)),
    )
    assert (found.topology, found.tokens, found.layers) == ("tp2", 3, "d")
    assert found.schedule is None and not found.late and not found.relation and not found.aux


def test_below_an_example_nothing_is_larger() -> None:
    top = Example(
        topology="tep4pp2",
        layers="dmd",
        moe_backend=MEGA_MOE,
        dtype="bfloat16",
        token_ids=(1, 2, 3),
        seq_lens=(3,),
    )
    below = SPACE.below(top)
    words = {"tp1", "pp2", "tep2", "tep4", "tep2pp2", "tep4pp2"}
    assert {t.word for t in below.topologies} == words
    assert below.most_tokens == 3 and not below.late and not below.schedules

    @settings(max_examples=50, deadline=None, database=None)
    @given(below.examples())
    def examine(example: Example) -> None:
        assert example.tokens <= 3 and example.schedule is None and not example.late
        assert example.layers in {"d", "m", "dd", "mm", "dmd"}

    examine()


def test_a_round_draws_from_a_few_models() -> None:
    some = SPACE.some(random.Random(1))
    assert len(some.topologies) == 3 and len(some.patterns) == 2 and len(some.dtypes) == 2
    rounds = [SPACE.some(random.Random(number)) for number in range(60)]
    assert {pattern for each in rounds for pattern in each.patterns} == set(PATTERNS)
    assert {t.word for each in rounds for t in each.topologies} == {
        t.word for t in SPACE.topologies
    }


def test_the_rich_examples_come_with_all_axes_first_and_have_everything() -> None:
    rich = SPACE.rich()
    assert [example.topology for example in rich[:2]] == ["tep2pp2", "tep2pp2"]
    assert {example.topology for example in rich} == {t.word for t in SPACE.topologies}
    for example in rich:
        assert example.options()
        assert example.late and example.aux and example.relation == RELATIONS[0]
    assert rich[0].moe_backend == MEGA_MOE


@pytest.mark.parametrize("seq_lens", [(0,), (1,), (17,), (3, 9, 5), (8, 8), (2, 2, 2)])
def test_sequences_are_starts_of_different_texts(seq_lens: tuple[int, ...]) -> None:
    tokens = batch_of(seq_lens, 256)
    assert len(tokens) == sum(seq_lens)
    starts = [tokens[sum(seq_lens[:i]) :][:1] for i, length in enumerate(seq_lens) if length]
    assert len({*starts}) == len(starts)


def test_sequences_fit_their_texts() -> None:
    # The n-th longest of sequences that sum to 17 is never longer than the n-th text.
    for longest in range(1, LONGEST + 1):
        for second in range(1, min(longest, LONGEST - longest) + 1):
            third = min(second, LONGEST - longest - second)
            lens = sorted([longest, second, third], reverse=True)
            assert all(length <= most for length, most in zip(lens, LENGTHS, strict=True))


def test_a_tally_says_what_was_never_drawn() -> None:
    tally = Tally()
    one = Example(topology="tep2", token_ids=(1,), seq_lens=(1,))
    tally.add(one)
    tally.add(one.model_copy(update={"late": True, "schedule": 3}), {"some fault"})
    assert tally.examples == 2 and tally.known == {"some fault": 1}
    assert tally.drawn["schedule"] == {"plain": 1, "permuted, late": 1}
    never = tally.never({"topology": {"tep2", "tp2"}, "tokens": {"1"}})
    assert never == {"topology": ["tp2"]}
    other = Tally()
    other.merge(tally)
    other.merge(tally)
    assert other.examples == 4 and other.drawn["topology"] == {"tep2": 4}


@pytest.mark.parametrize(
    ("tokens", "tp", "kind"),
    [(0, 2, "none"), (1, 2, "fewer than ranks"), (4, 2, "even"), (5, 2, "uneven"), (3, 1, "even")],
)
def test_token_classes(tokens: int, tp: int, kind: str) -> None:
    assert token_class(tokens, tp) == kind


def test_dimensions_can_be_held_to_one_value() -> None:
    space = Space.of().only(["attention=dense", "dtype=bfloat16", "moe_backend=auto"])
    assert (space.attentions, space.dtypes, space.backends) == (
        ("dense",),
        ("bfloat16",),
        ("auto",),
    )
    assert space.topologies == Space.of().topologies
    assert space.expected()["attention"] == {"dense"}


def test_megamoe_alone_leaves_the_topologies_that_spread_experts() -> None:
    assert all(t.ep for t in Space.of().only([f"moe_backend={MEGA_MOE}"]).topologies)
    with pytest.raises(UsageError, match="needs expert parallelism"):
        Space.of([Topology.parse("tp2")]).only([f"moe_backend={MEGA_MOE}"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokens=3", "--only tokens=3: use attention=..., dtype=..."),
        ("dtype", "--only dtype: use dtype= float32"),
        ("attention=sparse", "use attention= dense, model"),
    ],
)
def test_what_cannot_be_held_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        Space.of().only([text])
