"""A hand-over that lost, moved or mixed something up is told from one that did not."""

from __future__ import annotations

import pytest
import torch

from properties.handover import Content, handed_over


def content(layer: str, head: int, received: torch.Tensor | None = None) -> Content:
    """Five tokens, all different, of a head of a layer."""
    sent = torch.arange(10.0).view(5, 2) + 100 * head + 1000 * int(layer[-1])
    received = sent if received is None else received
    return Content(layer=layer, head=head, rank=head, sent=sent, received=received)


def others() -> list[Content]:
    return [content("layer0", 0), content("layer0", 1), content("layer1", 0)]


def verdict(wrong: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    contents = [content("layer0", 0), content("layer0", 1, wrong), content("layer1", 0)]
    found = handed_over({"request 4": contents, "request 5": elsewhere()})
    assert not found.ok and found.name == "hand-over"
    assert found.at == "layer0" and "request 4" in found.what and "rank 1" in found.where
    return found.kind, found.what, found.rows


def elsewhere() -> list[Content]:
    """What another request has: other values."""
    return [
        Content(layer=c.layer, head=c.head, rank=c.rank, sent=c.sent + 0.5, received=c.sent + 0.5)
        for c in others()
    ]


RIGHT = content("layer0", 1).sent


def with_rows(rows: list[int], values: torch.Tensor) -> torch.Tensor:
    changed = RIGHT.clone()
    changed[rows] = values
    return changed


@pytest.mark.parametrize(
    ("wrong", "kind", "says", "rows"),
    [
        (with_rows([3, 4], torch.full((2, 2), torch.nan)), "missing", "2 of 5 tokens", (3, 4)),
        (content("layer0", 0).sent, "wrong heads", "head 0", (0, 1, 2, 3, 4)),
        (content("layer1", 0).sent, "wrong layer", "layer1", (0, 1, 2, 3, 4)),
        (with_rows([4], RIGHT[[3]]), "duplicated", "tokens 3", (4,)),
        (RIGHT[[1, 0, 2, 3, 4]], "duplicated", "tokens 1, 0", (0, 1)),
        (with_rows([2], RIGHT[[2]] + 0.5), "stale", "request 5", (2,)),
        (with_rows([2], torch.zeros(1, 2)), "unknown", "never sent", (2,)),
    ],
)
def test_what_is_wrong_is_told(
    wrong: torch.Tensor, kind: str, says: str, rows: tuple[int, ...]
) -> None:
    found, what, where = verdict(wrong)
    assert (found, where) == (kind, rows)
    assert says in what


def test_a_right_hand_over_holds_and_says_how_much_was_compared() -> None:
    found = handed_over({"request 4": others(), "request 5": elsewhere()})
    assert found.ok and "2 hand-overs" in found.what and "6 heads" in found.what
    assert handed_over({}).ok
