"""Every number is spelt and read back, in each format and mix of formats that a checkpoint has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from model.provenance import NO_ELEMENT, UNWRITTEN, ZERO_FILLED, Numbering, trace

FORMATS = [
    (torch.float32,),
    (torch.float64,),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32),
    (torch.float32, torch.uint8),
]


class Copier(nn.Module):
    """A model whose loader copies each tensor into the parameter of its name, changed or not."""

    def __init__(self, numbering: Numbering, change: str = "") -> None:
        super().__init__()
        self.change = change
        for name, shape in numbering.shapes.items():
            value = torch.zeros(shape, dtype=numbering.dtypes[name])
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def load_weights(self, weights: object) -> None:
        for name, weight in dict(weights).items():  # type: ignore[call-overload]
            parameter = getattr(self, name)
            if self.change == "half":
                parameter.data[: len(weight) // 2].copy_(weight[: len(weight) // 2])
            elif self.change == "scaled":
                parameter.data.copy_(weight.double() * 1.25)
            elif self.change == "zero":
                parameter.data.zero_()
            else:
                parameter.data.copy_(weight)


def numbering_of(dtypes: tuple[torch.dtype, ...], rows: int = 300) -> Numbering:
    return Numbering.of({f"w{i}": torch.zeros(rows, 128, dtype=d) for i, d in enumerate(dtypes)})


@pytest.mark.parametrize("dtypes", FORMATS, ids=str)
def test_each_element_says_its_number(dtypes: tuple[torch.dtype, ...]) -> None:
    numbering = numbering_of(dtypes)
    assert numbering.total == 300 * 128 * len(dtypes)
    loaded = trace(Copier(numbering), numbering).parameters
    for name in numbering.first:
        assert torch.equal(loaded[name], numbering.numbers(name))
    numbers = torch.cat([value.flatten() for value in loaded.values()])
    assert numbers.sort().values.tolist() == list(range(1, numbering.total + 1))


@pytest.mark.parametrize("dtypes", FORMATS, ids=str)
def test_what_is_no_element_is_told_apart(dtypes: tuple[torch.dtype, ...]) -> None:
    numbering = numbering_of(dtypes)
    half = trace(Copier(numbering, "half"), numbering).parameters["w0"]
    assert torch.equal(half[:150], numbering.numbers("w0")[:150])
    assert (half[150:] == UNWRITTEN).all()
    zero = trace(Copier(numbering, "zero"), numbering).parameters["w0"]
    assert (zero == ZERO_FILLED).all()


def test_computed_values_are_no_elements() -> None:
    numbering = numbering_of((torch.bfloat16, torch.float32))
    scaled = trace(Copier(numbering, "scaled"), numbering).parameters["w1"]
    assert (scaled == NO_ELEMENT).float().mean() > 0.5
    assert (scaled != numbering.numbers("w1")).all()


def test_the_model_is_left_as_it_was() -> None:
    numbering = numbering_of((torch.bfloat16,), rows=3)
    model = Copier(numbering)
    model.w0.data.fill_(7)
    trace(model, numbering)
    assert (model.w0 == 7).all()


def test_a_format_that_spells_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w is torch\.int64; use a float"):
        Numbering.of({"w": torch.zeros(2, dtype=torch.int64)})
