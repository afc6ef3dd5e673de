"""No rule speaks of a right program of the field, on the layout it is written for."""

import pytest

from properties.sanitizer import Sanitizer
from sim import Topology, World
from tests.properties.sanitizer import field_data, field_stages, field_tensor
from tests.properties.sanitizer.layouts import Program

RIGHT = (*field_data.RIGHT, *field_tensor.RIGHT, *field_stages.RIGHT)


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
@pytest.mark.parametrize("word", ["tp4", "dp2tp2"])
def test_a_right_program_is_left_alone(program: Program, word: str) -> None:
    sanitizer = Sanitizer(topology=Topology.parse(word))
    with World(word, observers=[sanitizer]) as world:
        world.run(program)
        assert world.ledger.entries
    assert [str(finding) for finding in sanitizer.findings] == []


def test_there_are_many() -> None:
    assert len(RIGHT) >= 40
