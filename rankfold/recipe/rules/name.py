"""`name` and `file-name`: what a recipe is called against what it is.

Names are `...-XpYd-<prefill>-<decode>[-eagle3][-cN][-<isl><osl>]`, with the precision and the GPU
somewhere, and `-Nn` for the nodes. Parts that are no such word are somebody's own and are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

from rankfold.recipe.finding import Finding
from rankfold.recipe.flags import flag
from rankfold.recipe.source import Path, Place
from rankfold.recipe.view import Recipe
from rankfold.recipe.words import WORD, Degrees, degrees_of

RULE = "name"
FILE_RULE = "file-name"

GPUS = ("gb200", "gb300", "b200", "b300", "h100", "h200")
PRECISIONS = {
    "fp4": "fp4", "nvfp4": "fp4", "mxfp4": "fp4", "fp8": "fp8", "mxfp8": "fp8", "bf16": "bf16",
    "fp16": "fp16", "int4": "int4", "int8": "int8",
}  # fmt: skip
"""Words for precisions, and the family of each."""
SPECULATION = re.compile(r"(?:eagle3?|mtp|dspark)(?!0)\d*")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One word of a name, and where it begins."""

    text: str
    start: int


@dataclass(kw_only=True)
class Named:
    """What a name says, by the words that say it."""

    counts: Part | None = None
    """XpYd."""
    words: list[tuple[Part, Degrees]] = field(default_factory=list)
    lengths: Part | None = None
    """The thousands of tokens in and out, 8k1k."""
    nodes: Part | None = None
    concurrencies: list[Part] = field(default_factory=list)
    precision: Part | None = None
    gpu: Part | None = None
    speculation: Part | None = None


def parse(name: str) -> Named:
    """Read a name's words."""
    named = Named()
    precisions: list[Part] = []
    gpus: list[Part] = []
    for match in re.finditer(r"[a-z0-9.]+", name.lower()):
        part = Part(text=match[0], start=match.start())
        if re.fullmatch(r"\d{1,3}p\d{1,3}d", part.text):
            named.counts = part
        elif re.fullmatch(r"\d{1,3}k\d{1,3}k", part.text):
            named.lengths = part
        elif re.fullmatch(r"c(?:onc)?\d{1,6}", part.text):
            named.concurrencies.append(part)
        elif re.fullmatch(r"\d{1,4}n", part.text):
            named.nodes = part
        elif part.text in PRECISIONS:
            precisions.append(part)
        elif part.text in GPUS:
            gpus.append(part)
        elif SPECULATION.fullmatch(part.text):
            named.speculation = part
        elif re.fullmatch(WORD, part.text) and (degrees := degrees_of(part.text)):
            named.words.append((part, degrees))
    # Two of a kind are about something else as well: weights and cache, or a comparison.
    named.precision = precisions[0] if len(precisions) == 1 else None
    named.gpu = gpus[0] if len(gpus) == 1 else None
    return named


def check(recipe: Recipe) -> Iterator[Finding]:
    """Findings about the name and the file's name."""
    if recipe.model.name:
        yield from _compare(recipe, recipe.model.name, RULE, ("name",), "the name")
    stem = PurePath(recipe.source.path).stem
    top = Place(line=1, column=1)
    yield from _compare(recipe, stem, FILE_RULE, top, "the file's name")


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A word of a name that says something else than the configuration."""

    part: Part
    right: str = ""
    """What it should be, empty if that is not known."""
    told: str


def _compare(
    recipe: Recipe, name: str, rule: str, where: Path | Place, what: str
) -> Iterator[Finding]:
    named = parse(name)
    wrong = [*_counts(recipe, named), *_words(recipe, named), *_load(recipe, named)]
    wrong += _others(recipe, named)
    if not wrong:
        return
    right = name
    for one in sorted(wrong, key=lambda one: -one.part.start):
        if one.right:
            end = one.part.start + len(one.part.text)
            right = right[: one.part.start] + one.right + right[end:]
    told = "; ".join(one.told for one in wrong)
    suggestion = f"{'rename it' if rule == FILE_RULE else 'write'} {right}" if right != name else ""
    yield recipe.source.finding(rule, where, f"{what} says {told}", suggestion)


def _counts(recipe: Recipe, named: Named) -> Iterator[Wrong]:
    prefill, decode = recipe.side("prefill"), recipe.side("decode")
    if named.counts is None or prefill is None or decode is None:
        return
    right, said = f"{prefill.workers}p{decode.workers}d", named.counts.text
    if right != said:
        yield Wrong(part=named.counts, right=right, told=f"{said}, and the workers are {right}")


def _words(recipe: Recipe, named: Named) -> Iterator[Wrong]:
    """Two words are prefill's and decode's; one may be that of either side."""
    if len(named.words) == 2 and [side.name for side in recipe.sides] == ["prefill", "decode"]:
        for (part, degrees), side in zip(named.words, recipe.sides, strict=True):
            is_ = side.settled
            if is_ is not None and not _same(degrees, is_):
                told = f"{side.name} {part.text}, and it is {is_.word}"
                yield Wrong(part=part, right=is_.word, told=told)
    elif len(named.words) == 1 and recipe.sides:
        part, degrees = named.words[0]
        settled = {side.name: side.settled for side in recipe.sides}
        if any(is_ is None or _same(degrees, is_) for is_ in settled.values()):
            return
        words = {name: is_.word for name, is_ in settled.items() if is_}
        are = " and ".join(f"{name} is {word}" for name, word in words.items())
        right = next(iter(words.values())) if len(set(words.values())) == 1 else ""
        yield Wrong(part=part, right=right, told=f"{part.text}, and {are}")


def _same(a: Degrees, b: Degrees) -> bool:
    """Whether two are alike; on one GPU experts are spread over nothing."""
    return (a.tp, a.pp, a.dp) == (b.tp, b.pp, b.dp) and (a.gpus == 1 or a.ep == b.ep)


def _load(recipe: Recipe, named: Named) -> Iterator[Wrong]:
    benchmark = recipe.model.benchmark
    if benchmark and named.lengths and benchmark.isl and benchmark.osl:
        isl, osl = (int(n) for n in re.findall(r"\d+", named.lengths.text))
        for key, said, is_ in (("isl", isl, benchmark.isl), ("osl", osl, benchmark.osl)):
            if not 1000 * said <= is_ <= 1024 * said:
                told = f"{key} {said}k, and benchmark.{key} is {is_}"
                yield Wrong(part=named.lengths, told=told)
    points = recipe.concurrencies
    for part in named.concurrencies:
        if points and int(re.sub(r"\D", "", part.text)) not in points:
            shown = "x".join(map(str, points))
            yield Wrong(
                part=part,
                right=f"c{shown}" if len(points) == len(named.concurrencies) == 1 else "",
                told=f"{part.text}, and benchmark.concurrencies is {shown}",
            )


def _others(recipe: Recipe, named: Named) -> Iterator[Wrong]:
    nodes = [side.nodes for side in recipe.sides if side.nodes is not None]
    total = sum(nodes)
    # A node more may be there for the head and its services.
    if named.nodes and nodes and int(named.nodes.text[:-1]) not in (total, total + 1):
        told = f"{named.nodes.text[:-1]} nodes, and there are {total}"
        yield Wrong(part=named.nodes, right=f"{total}n", told=told)
    model, said = recipe.model.model, named.precision
    precision = PRECISIONS.get((model.precision or "").lower()) if model else None
    if said and precision and PRECISIONS[said.text] != precision:
        told = f"{said.text}, and model.precision is {precision}"
        yield Wrong(part=said, right=precision, told=told)
    gpu = (recipe.resources.gpu_type or "").lower()
    if named.gpu and gpu in GPUS and named.gpu.text != gpu:
        told = f"{named.gpu.text}, and resources.gpu_type is {gpu}"
        yield Wrong(part=named.gpu, right=gpu, told=told)
    serving = recipe.serving
    if named.speculation and serving and serving.flags:
        names = ("speculative-config", "spec-method", "spec-model")
        if all(flag(serving.flags, name) is None for name in names):
            told = f"{named.speculation.text}, and {serving.name} has no speculative-config"
            yield Wrong(part=named.speculation, told=told)
