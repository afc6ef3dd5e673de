"""`stale-comment`: a comment describes another topology than the configuration.

Which sentences count as descriptions is decided in `descriptor`. Here comments become sentences
with their places, and claims are compared: a claim is wrong only if nothing that it may refer to
has its value. A sentence between others that speak of the past or of alternatives is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankfold.recipe.allow import is_ours
from rankfold.recipe.descriptor import claims_of
from rankfold.recipe.facts import (
    Facts,
    corrected,
    facts_of,
    facts_of_point,
    holds,
    listed,
    said,
    true_instead,
)
from rankfold.recipe.finding import Finding
from rankfold.recipe.master import Point
from rankfold.recipe.source import Comment, Path, Place, Source
from rankfold.recipe.view import Recipe

RULE = "stale-comment"

_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!cf)(?<!vs)(?<!etc)(?<!incl)[.!?](?=\s|$)", re.IGNORECASE)
_ELSEWHEN = re.compile(
    r"\b(was|were|previous(ly)?|former(ly)?|before|earlier|old(er)?|used to|until|no longer"
    r"|original(ly)?|histor\w+|alternativ\w+|instead|would|could|might|plan(s|ned)?|todo|tried"
    r"|changelog|deprecated|example|supersed\w+|replac\w+|once|ago|other|another)\b|->|→|=>",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Comments that belong together: their text, and where each character of it stands."""

    text: str
    places: tuple[Place, ...]
    end_line: int
    column: int
    trailing: bool


def check_recipe(recipe: Recipe) -> Iterator[Finding]:
    """Findings for the comments of a recipe."""
    if not recipe.sides:
        return
    facts = facts_of(recipe)
    for block in blocks(recipe.source):
        yield from check_block(recipe.source, block, facts, _side_of(recipe.source, block))


def check_master(
    source: Source, points: Sequence[tuple[Point, Recipe | None]]
) -> Iterator[Finding]:
    """Findings for comments directly above points of a sweep; others are about many of them."""
    lines = {source.keys[point.at].line: (point, recipe) for point, recipe in points}
    for block in blocks(source):
        point, recipe = lines.get(block.end_line + 1, (None, None))
        if point is not None and point.sides and not block.trailing:
            yield from check_block(source, block, facts_of_point(point, recipe))


def blocks(source: Source) -> list[Block]:
    """The comments of a file: those on lines of their own that follow each other are one block."""
    groups: list[list[Comment]] = []
    for comment in source.comments:
        if is_ours(comment):
            continue
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and last.own_line
            and comment.own_line
            and comment.place.column == last.place.column
            and (comment.place.line == last.place.line + 1 or last.text.rstrip().endswith(":"))
        ):
            groups[-1].append(comment)
        else:
            groups.append([comment])
    return [_block(group) for group in groups]


def _block(comments: list[Comment]) -> Block:
    text, places = "", []
    for comment in comments:
        for offset, character in enumerate(comment.text + " "):
            text += character
            places.append(Place(line=comment.place.line, column=comment.place.column + 1 + offset))
    return Block(
        text=text,
        places=tuple(places),
        end_line=comments[-1].place.line,
        column=comments[0].place.column,
        trailing=not comments[0].own_line,
    )


def check_block(
    source: Source, block: Block, facts: Facts, default_side: str | None = None
) -> Iterator[Finding]:
    """Findings for the sentences of a block: one for each sentence that is wrong."""
    sentences = _sentences(block.text)
    for index, (start, end) in enumerate(sentences):
        around = sentences[max(0, index - 1) : index + 2]
        if any(_ELSEWHEN.search(block.text[a:b]) for a, b in around):
            continue
        sentence = block.text[start:end]
        claims = claims_of(sentence, default_side)
        if _of_another_gpu(sentence, facts):
            continue
        wrong = [claim for claim in claims if not holds(claim, facts)]
        if not wrong:
            continue
        says = listed((claim.side, said(claim)) for claim in wrong)
        are = listed((claim.side, true_instead(claim, facts)) for claim in wrong)
        yield source.finding(
            RULE,
            block.places[start + wrong[0].start],
            f"the comment says {says}; the configuration has {are or 'no such side'}",
            corrected(sentence, wrong, facts),
        )


def _sentences(text: str) -> list[tuple[int, int]]:
    found, start = [], 0
    for match in _END.finditer(text):
        found.append((start, match.end()))
        start = match.end()
    found.append((start, len(text)))
    return [(a, b) for a, b in found if text[a:b].strip()]


def _of_another_gpu(sentence: str, facts: Facts) -> bool:
    named = {gpu.lower() for gpu in re.findall(r"\b(?:gb|b|h)[1-3]00\b", sentence, re.IGNORECASE)}
    return bool(named) and facts.gpu_type not in named and bool(facts.gpu_type)


def _side_of(source: Source, block: Block) -> str | None:
    """The side that a comment stands at: its line's, or that of the key below it."""
    line = block.end_line if block.trailing else block.end_line + 1
    for path, place in source.keys.items():
        if place.line == line and (block.trailing or place.column == block.column):
            return _side_in(path)
    return None


def _side_in(path: Path) -> str | None:
    for step in reversed(path):
        for side in ("prefill", "decode"):
            if side in str(step):
                return side
    return None
