"""`rebound` runs a method's own code with other names, and changes nothing else."""

from __future__ import annotations

import pytest

from model.overlay.rebind import rebound


class Part:
    def __init__(self, size: int) -> None:
        self.size = size


class Base:
    def __init__(self, start: int) -> None:
        self.start = start


class Whole(Base):
    def __init__(self, start: int, *, count: int = 2) -> None:
        super().__init__(start)
        self.parts = [make(count) for make in [lambda n: Part(n)]]


class OtherPart(Part):
    pass


class OtherWhole(Whole):
    def __init__(self, start: int) -> None:
        rebound(super().__init__, Part=OtherPart)(start)


def test_a_constructor_names_the_other_class_also_in_its_lambdas() -> None:
    made = OtherWhole(7)
    assert made.start == 7
    assert type(made.parts[0]) is OtherPart and made.parts[0].size == 2


def test_the_original_is_untouched() -> None:
    OtherWhole(7)
    assert type(Whole(7).parts[0]) is Part
    assert globals()["Part"] is Part


def test_a_name_that_the_method_does_not_use_is_refused_in_a_line() -> None:
    with pytest.raises(NameError, match=r"Whole\.__init__ of this vLLM does not use Elsewhere"):
        rebound(Whole(1).__init__, Elsewhere=Part)
