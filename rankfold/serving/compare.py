"""What two topologies have made of the same requests: tokens and prompt logprobs.

With the same TP, DP, EP and sequence parallelism every sum has the same terms in the same order:
tokens and logprobs are equal, bit for bit. Otherwise sums round differently, and three things may
follow, all legal:

- logprobs differ, within the sum of the bounds of the two runs;
- a near tie between experts or blocks falls the other way, and from that token on the sequence is
  another one; the reference has followed both runs, so both were right;
- a near tie between two tokens falls the other way. It is one if the reference has their scores no
  further apart than twice the larger bound: each run may be off by its bound at both tokens.

What follows a near tie is not compared; it is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

import reference
from properties import Verdict
from rankfold import report
from rankfold.options import Options
from rankfold.serving.drive import Served
from rankfold.serving.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Run:
    """One topology's run of the requests."""

    options: Options
    served: Served
    bounds: reference.Bounds
    """The reference's run of its sequences, which has followed its choices."""
    name: str = ""
    """What ran them; the topology if it is empty."""

    def __str__(self) -> str:
        return self.name or str(self.options.topology)


@dataclass(frozen=True, kw_only=True)
class _Apart:
    """How far two runs of one request agree."""

    delta: float
    """Largest difference of a logprob that has to agree."""
    same: bool
    """Whether all tokens are the same."""
    note: str = ""
    """The near tie that ended the comparison, if one did."""
    wrong: str = ""
    """What is wrong, if something is."""


def exact(one: Options, other: Options) -> bool:
    """Whether two runs have to agree bit for bit: every sum has the same terms in one order."""
    a, b = ((o.topology.tp, o.topology.dp, o.topology.ep, o.shards_stream) for o in (one, other))
    return a == b


def compare(
    one: Run, other: Run, sampling: Sampling, *, bitwise: bool | None = None
) -> tuple[Verdict, report.Against]:
    """Compare two runs of the same requests, both to their end.

    bitwise: whether they have to agree bit for bit; None to tell by their topologies.
    """
    if bitwise is None:
        bitwise = exact(one.options, other.options)
    allowed = 0.0 if bitwise else one.bounds.taps["logprobs"] + other.bounds.taps["logprobs"]
    found = [
        _bits(one.served, other.served, request)
        if bitwise
        else _request(one, other, sampling, request, allowed)
        for request in range(len(one.served.tokens))
    ]
    delta = max((each.delta for each in found), default=0.0)
    same = all(each.same for each in found)
    notes = [f"request {i}: {each.note}" for i, each in enumerate(found) if each.note]
    wrong = [f"request {i}: {each.wrong}" for i, each in enumerate(found) if each.wrong]
    how = "bit for bit" if bitwise else f"within rounding ({allowed:.2g})"
    pair = f"{one} and {other}"
    verdict = Verdict(
        name="against",
        ok=not wrong,
        what=f"tokens and logprobs of {pair} "
        + (f"are not equal {how}" if wrong else f"are equal {how}")
        + "".join(f"; {note}" for note in notes),
        where=wrong[0] if wrong else "",
        why="the same TP degree sums the same terms in the same order" if wrong and bitwise else "",
        kind="topologies differ" if wrong else "",
        at="logprobs" if wrong else "",
    )
    return verdict, report.Against(
        topology=str(other),
        max_abs_delta=delta,
        bound=allowed,
        same_tokens=same,
        near_ties=notes,
    )


def _bits(one: Served, other: Served, request: int) -> _Apart:
    """One request, bit for bit."""
    mine, theirs = one.sampled[request], other.sampled[request]
    delta = _largest(one.prompt_logprobs[request], other.prompt_logprobs[request])
    wrong = ""
    if delta > 0:
        wrong = f"prompt logprobs differ by {delta:.3g}"
    elif mine != theirs:
        wrong = f"token {_first_difference(mine, theirs)} differs"
    elif one.logprobs[request] != other.logprobs[request]:
        wrong = "the tokens are the same, and their logprobs are not"
    return _Apart(delta=delta, same=mine == theirs, wrong=wrong)


def _request(one: Run, other: Run, sampling: Sampling, request: int, allowed: float) -> _Apart:
    """One request, within rounding and up to a near tie."""
    prompt = one.served.plan.prompts[request]
    mine, theirs = one.served.sampled[request], other.served.sampled[request]
    count = _first_difference(mine, theirs)
    same = count is None
    # Fed alike: the prompt, and the sampled tokens before the first that differs.
    alike = min(one.served.lengths[request], prompt + (len(mine) if count is None else count))
    position, what = _other_choice(one, other, request, alike)
    logprobs = one.served.prompt_logprobs[request], other.served.prompt_logprobs[request]
    delta = _largest(*(of_run[:position] for of_run in logprobs))
    if not delta <= allowed:
        text = f"prompt logprobs differ by {delta:.3g}"
        return _Apart(delta=delta, same=same, wrong=text)
    # The logprob of the n-th sampled token comes from row prompt - 1 + n.
    sampled = max(0, min(len(mine) if count is None else count, position - prompt + 1))
    logprobs = one.served.logprobs[request], other.served.logprobs[request]
    apart = _largest(*(of_run[:sampled] for of_run in logprobs))
    if not apart <= allowed:
        text = f"logprobs of the same sampled tokens differ by {apart:.3g}"
        return _Apart(delta=max(delta, apart), same=same, wrong=text)
    delta = max(delta, apart)
    if count is None:
        return _Apart(delta=delta, same=True, note=what)
    row = prompt - 1 + count
    if position <= row:
        return _Apart(delta=delta, same=False, note=f"{what}; tokens differ from {count} on")
    start = [0, *accumulate(one.served.lengths)][request]
    logits = one.bounds.result.taps["logits"][start + row]
    scores = sampling.scores(request, count, logits)
    margin = float((scores[mine[count]] - scores[theirs[count]]).abs())
    bound = 2 * max(one.bounds.taps["logits"], other.bounds.taps["logits"])
    tie = f"near tie at token {count}: margin {margin:.2g} within bound {bound:.2g}"
    if margin <= bound:
        return _Apart(delta=delta, same=False, note=tie)
    wrong = (
        f"token {count} is {mine[count]} and {theirs[count]}, whose scores are {margin:.3g} apart "
        f"(rounding explains {bound:.2g})"
    )
    return _Apart(delta=delta, same=False, wrong=wrong)


def _other_choice(one: Run, other: Run, request: int, alike: int) -> tuple[int, str]:
    """The first position of a request where the runs chose other experts or blocks, and what.

    alike: positions that were fed alike; without another choice among them it is returned.
    """
    first, what = alike, ""
    starts = [[0, *accumulate(run.served.lengths)][request] for run in (one, other)]
    for name, mine in one.bounds.result.taps.items():
        if not name.endswith("_chosen"):
            continue
        theirs = other.bounds.result.taps[name]
        a, b = (t[s : s + alike] for t, s in zip((mine, theirs), starts, strict=True))
        rows = (a != b).flatten(1).any(dim=1).nonzero().flatten().tolist()
        if rows and rows[0] < first:
            layer = name.removesuffix("_chosen").removeprefix("layers.").split(".")
            first = rows[0]
            what = f"near tie between {layer[1]} of layer {layer[0]} at position {first}"
    return first, what


def _first_difference(mine: list[int], theirs: list[int]) -> int | None:
    pairs = enumerate(zip(mine, theirs, strict=True))
    return next((i for i, (a, b) in pairs if a != b), None)


def _largest(mine: list[float], theirs: list[float]) -> float:
    deltas = torch.tensor(mine, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
    return float(deltas.abs().max().nan_to_num(nan=torch.inf)) if len(mine) else 0.0
