"""Reads comments that describe a topology, and nothing else: sentences into claims.

A comment is prose, and most prose about topologies is history, contrast or reason: "the earlier
DP32 attempt", "TP8, not TP16", "mirrored from 3p1d-dep8-dep16". So a sentence makes claims only if
*every* word of it belongs to a small vocabulary of descriptions: counts, sides, topology words,
GPUs, nodes, and words that join them. One word outside of it (was, not, from, than, an arrow, a
date) and the sentence is left alone. A sentence that gives one side two different values is about a
change or a choice, and is left alone too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rankfold.recipe.flags import words
from rankfold.recipe.words import MAX_DEGREE

_NUMBERS = {"one": 1, "single": 1, "two": 2, "three": 3, "four": 4, "six": 6, "eight": 8}
_N = r"(?P<{0}>\d{{1,5}}|" + "|".join(_NUMBERS) + ")"
_ROLE = r"(?:prefill|decode)"
_TIMES = "[x\N{MULTIPLICATION SIGN}]"
_A_WORKER = r"(?:/[ ]?worker\b|per[ ]worker\b|a[ ]worker\b)"
_FILL = "|".join(
    sorted(
        words(
            """
    workers? nodes? gpus? total each per with x \N{MULTIPLICATION SIGN} wide topology layout head
    infra mode side ep tp dp pp attention disaggregated aggregated disagg agg serving recipe has
    have the an? on over across of in is are all fp[48] mxfp[48] nvfp4 bf16 \\d{1,3}k/?\\d{1,3}k
    """
        )
    )
)
"""Words that descriptions have and that claim nothing."""

_TOKENS = re.compile(
    "|".join(
        (
            r"(?P<xpyd>(?P<xp>\d{1,3})p(?P<yd>\d{1,3})d)\b",
            rf"(?:{_N.format('pworkers')}[ ]?p(?=[ ]|$))",
            rf"(?:{_N.format('dworkers')}[ ]?d(?=[ ]|$))",
            r"(?P<axis>dep|tep|tp|pp|dp|ep)[ ]?=?[ ]?(?P<degree>\d{1,4})"
            r"(?=[^a-z0-9.]|(?:ep|pp)\d|[.](?:\s|$)|$)",
            rf"{_N.format('times')}[ ]?{_TIMES}[ ]?(?=dep|tep|tp|dp)",
            rf"{_N.format('pernode')}[ ]?gpus?[ ]?(?:/|per[ ]|a[ ])[ ]?node\b",
            rf"{_N.format('perworker')}[ ]?gpus?[ ]?{_A_WORKER}",
            rf"{_N.format('each')}[ ]?gpus?[ ]each\b",
            rf"{_N.format('nodesper')}[ ]?nodes?[ ]?(?:{_A_WORKER}|each\b)",
            rf"{_N.format('nodestotal')}[ ]?nodes?[ ](?:in[ ])?total\b",
            r"(?P<nodesshort>\d{1,4})n\b",
            rf"{_N.format('nodes')}[ ](?P<nodesrole>{_ROLE}[ ])?nodes?\b",
            rf"{_N.format('gpus')}[ ]?(?P<gpusrole>{_ROLE}[ ])?gpus?\b",
            rf"{_N.format('rolecount')}[ ]?{_TIMES}?[ ]?(?:wide[ ]|single[ ])?"
            rf"(?P<role>{_ROLE})(?:[ ]workers?)?\b",
            rf"{_N.format('anyworkers')}[ ]workers?\b",
            r"(?:conc(?:urrency|urrencies)?)[ :=]*"
            r"(?P<conc>\d{1,6}(?:(?:[ ]?[,/][ ]?|x)\d{1,6})*)\b",
            rf"(?P<side>{_ROLE})\b",
            r"(?P<gpu>gb[ ]?[23]00|b[23]00|h[12]00)\b",
            r"(?P<split>[+|;]|and\b)",
            r"(?P<comma>,)",
            r"(?P<open>[(\[])",
            r"(?P<close>[)\]])",
            rf"(?P<fill>{_FILL})(?![a-z0-9])",
            r"(?P<punctuation>[.:=/&\-])",
            r"(?P<blank>\s+)",
        )
    ),
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One number or word of a description, and what it is said to be."""

    kind: str
    """workers, degree, gpus, gpus_each, gpus_per_worker, gpus_per_node, nodes, nodes_per_worker,
    nodes_total or conc."""
    side: str | None
    """prefill or decode; None if the sentence does not say."""
    value: int
    axis: str = ""
    """Of a degree: dep, tep, tp, pp, dp or ep."""
    start: int
    """Where the number begins in the sentence."""
    end: int
    nested: bool = False
    """Whether it stands in brackets, and so explains what stands before them."""


def claims_of(sentence: str, default_side: str | None = None) -> list[Claim]:
    """What a sentence claims; empty if it is no pure description, or contradicts itself.

    Args:
        default_side: the side that the sentence is about where it names none.
    """
    tokens = _tokens(sentence)
    if tokens is None:
        return []
    claims: list[Claim] = []
    label_nodes = re.match(r"\s*nodes\s*:", sentence, re.IGNORECASE) is not None
    for segment in _segments(tokens, default_side):
        claims += _without_sglang_tp(_segment_claims(segment, label_nodes))
    claims = _paired(claims, tokens)
    return [] if _contradictory(claims) else claims


def _tokens(sentence: str) -> list[re.Match[str]] | None:
    """The tokens, None if there is anything else in the sentence."""
    found, at = [], 0
    while at < len(sentence):
        match = _TOKENS.match(sentence, at)
        if match is None or match.end() == at:
            return None
        if match.lastgroup != "blank":
            found.append(match)
        at = match.end()
    return found


@dataclass(kw_only=True)
class _Segment:
    side: str | None
    tokens: list[re.Match[str]]
    nested: set[int]
    """Where tokens in brackets begin."""


def _segments(tokens: list[re.Match[str]], default_side: str | None) -> list[_Segment]:
    """Parts of the sentence that are about one side each."""
    segments = [_Segment(side=None, tokens=[], nested=set())]
    depth = 0
    carried: str | None = None
    for token in tokens:
        if token["open"]:
            depth += 1
        elif token["close"]:
            depth = max(0, depth - 1)
        elif (token["split"] or token["comma"]) and depth == 0:
            carried = _side(segments[-1].tokens) or carried if token["comma"] else None
            segments.append(_Segment(side=carried, tokens=[], nested=set()))
        else:
            segments[-1].tokens.append(token)
            if depth:
                segments[-1].nested.add(token.start())
    for segment in segments:
        named = _sides(segment.tokens)
        if len(named) == 1:
            segment.side = named.pop()
        elif len(named) > 1:
            segment.side = None
        elif segment.side is None:
            segment.side = default_side
    return segments


def _sides(tokens: list[re.Match[str]]) -> set[str]:
    found = set()
    for token in tokens:
        if token["pworkers"]:
            found.add("prefill")
        if token["dworkers"]:
            found.add("decode")
        role = token["side"] or token["role"] or token["nodesrole"] or token["gpusrole"]
        if role:
            found.add(role.strip().lower())
    return found


def _side(tokens: list[re.Match[str]]) -> str | None:
    named = _sides(tokens)
    return named.pop() if len(named) == 1 else None


_KINDS = {
    "pworkers": "workers",
    "dworkers": "workers",
    "times": "workers",
    "rolecount": "workers",
    "pernode": "gpus_per_node",
    "perworker": "gpus_per_worker",
    "each": "gpus_each",
    "anyworkers": "workers",
    "nodesper": "nodes_per_worker",
    "nodestotal": "nodes_total",
    "nodesshort": "nodes_total",
    "nodes": "nodes",
    "gpus": "gpus",
}


def _segment_claims(segment: _Segment, label_nodes: bool) -> list[Claim]:
    claims: list[Claim] = []
    for token in segment.tokens:
        first = len(claims)
        for group, kind in _KINDS.items():
            if token[group] is None:
                continue
            if group == "times" and segment.side is None:
                continue  # Twice DEP8: of which side?
            if group == "rolecount" and label_nodes:
                kind = "nodes"
            claims.append(_claim(token, group, kind, segment.side))
        if token["xpyd"]:
            claims.append(_claim(token, "xp", "workers", "prefill"))
            claims.append(_claim(token, "yd", "workers", "decode"))
        if token["axis"]:
            claim = _claim(token, "degree", "degree", segment.side, token["axis"].lower())
            if 1 <= claim.value <= MAX_DEGREE:
                claims.append(claim)
        if token["conc"]:
            for number in re.finditer(r"\d+", token["conc"]):
                start = token.start("conc") + number.start()
                claims.append(
                    Claim(
                        kind="conc",
                        side=None,
                        value=int(number[0]),
                        start=start,
                        end=start + len(number[0]),
                    )
                )
        if token.start() in segment.nested:
            claims[first:] = [replace(claim, nested=True) for claim in claims[first:]]
    return claims


def _without_sglang_tp(claims: list[Claim]) -> list[Claim]:
    """SGLang writes DEP8 as TP=8 / DP=8 / EP=8, where TP counts all ranks of the worker."""
    sizes = {claim.axis: claim.value for claim in claims if claim.kind == "degree"}
    if sizes.get("tp", 1) == 1 or sizes.get("tp") != sizes.get("dp"):
        return claims
    return [claim for claim in claims if claim.axis != "tp"]


def _claim(token: re.Match[str], group: str, kind: str, side: str | None, axis: str = "") -> Claim:
    text = token[group].lower()
    return Claim(
        kind=kind,
        side=side,
        value=_NUMBERS[text] if text in _NUMBERS else int(text),
        axis=axis,
        start=token.start(group),
        end=token.end(group),
    )


def _paired(claims: list[Claim], tokens: list[re.Match[str]]) -> list[Claim]:
    """After XpYd two words without a side are prefill's and decode's: `1p2d DEP4+DEP8`."""
    if not any(token["xpyd"] for token in tokens):
        return claims
    words = [i for i, claim in enumerate(claims) if claim.kind == "degree"]
    if len(words) != 2 or any(claims[i].side for i in words):
        return claims
    paired = list(claims)
    for i, side in zip(words, ("prefill", "decode"), strict=True):
        paired[i] = replace(claims[i], side=side)
    return paired


def _contradictory(claims: list[Claim]) -> bool:
    """Whether a side is given two values, or more words stand without a side than there are sides.

    What stands in brackets is a second account of the same, so the two may differ: a comment of
    which only one half was corrected is stale.
    """
    values: dict[tuple[str, str | None, str, bool], int] = {}
    unplaced = set()
    for claim in claims:
        if claim.kind == "degree" and claim.side is None:
            unplaced.add((claim.axis, claim.value))
            continue
        if claim.kind in ("gpus", "gpus_each", "nodes", "conc") or claim.side is None:
            continue  # Of a worker, of a side, of all: several may be right.
        axis = {"dep": "dp", "tep": "tp"}.get(claim.axis, claim.axis)
        key = (claim.kind, claim.side, axis, claim.nested)
        if values.setdefault(key, claim.value) != claim.value:
            return True
    return len([one for one in unplaced if one[0] in ("dep", "tep")]) > 2
