"""What the caller's source says of a sum or a gather of equal tensors, and what it does not."""

from pathlib import Path

import pytest

from properties.sanitizer.intent import averages, compares
from sim.callsite import Frame


def frame(folder: Path, body: str) -> Frame:
    """The line of the only collective in a function of this body."""
    lines = ["def step(x, out, ranks, norm):", *(f"    {line}" for line in body.splitlines())]
    file = folder / "program.py"
    file.write_text("\n".join(lines) + "\n")
    (line,) = (n for n, text in enumerate(lines, 1) if "dist." in text)
    return Frame(str(file), line, "step")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("dist.all_reduce(x)\nx /= ranks", True),
        ("dist.all_reduce(x)\nx.div_(dist_world_size())", True),
        ("dist.all_reduce(x)\nx.mul_(1.0 / ranks)", True),
        ("dist.all_reduce(x)\nx *= 1 / ranks", True),
        ("dist.all_reduce(x)\nreturn x / 4", True),
        ("dist.all_reduce(x.grad.data)\nx.grad /= ranks", True),
        ("dist.all_reduce(x)\nreturn x", False),
        ("dist.all_reduce(x)\nreturn x / norm", False),
        ("dist.all_reduce(x)\nreturn x / 8", False),
        ("dist.all_reduce(x)\nreturn out / ranks", False),
        ("x /= ranks\ndist.all_reduce(x)", False),
    ],
)
def test_an_average_divides_the_sum_by_the_ranks(tmp_path: Path, body: str, expected: bool) -> None:
    assert averages(frame(tmp_path, body), 4) is expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("dist.all_gather(out, x)\nassert all(torch.equal(o, x) for o in out)", True),
        ("dist.all_gather(out, x)\nfor o in out:\n    print(torch.allclose(o, x))", True),
        ("dist.all_gather(out, x)\nparts = out.chunk(2)\nassert (parts[0] == x).all()", True),
        ("dist.all_gather(out, x)\nreturn torch.cat(out)", False),
        ("dist.all_gather(out, x)\nassert out.shape == (8, 4)", False),
        ("assert torch.equal(out, x)\ndist.all_gather(out, x)", False),
        ("dist.all_gather(out, x)\nassert torch.equal(x, norm)", False),
    ],
)
def test_a_check_compares_what_was_gathered(tmp_path: Path, body: str, expected: bool) -> None:
    assert compares(frame(tmp_path, body)) is expected


def test_without_source_nothing_is_assumed() -> None:
    assert not averages(Frame("<string>", 1, "f"), 2)
    assert not compares(Frame("no such file.py", 1, "f"))
