"""What a wrong choice of key blocks looks like: whose it is, or why it cannot be one.

Sparse attention reads the blocks of keys that an indexer has chosen, for each token and index
head. A choice that is not the right one often is the right one of something else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from properties.explain import Diagnosis

NO_BLOCK = -1
"""What fills a choice of fewer blocks than there is room for."""


def diagnose_blocks(
    full: torch.Tensor, truth: torch.Tensor, earlier: Mapping[str, torch.Tensor]
) -> Diagnosis:
    """What the chosen blocks of one set of ranks look like, where they are wrong.

    Args:
        full: the blocks chosen, ids [T, G, K] of G index heads, sorted, -1 last.
        truth: the right ones, likewise.
        earlier: the right ones of the layers before, by tap, in program order.
    """
    if full.shape != truth.shape:
        text = f"has shape {list(full.shape)} instead of {list(truth.shape)}"
        return Diagnosis(kind="wrong shape", text=text)
    wrong = (full != truth).any(dim=-1)
    for name, value in reversed([*earlier.items()]):
        if value.shape == full.shape and torch.equal(full[wrong], value[wrong].to(full.dtype)):
            text = f"is what {name} was: this layer's own choice did not reach the attention"
            return Diagnosis(kind="stale", text=text)
    if swapped := _heads(full, truth, wrong):
        mine, theirs = (", ".join(map(str, side)) for side in (swapped, swapped.values()))
        text = f"index heads {mine} have the blocks of heads {theirs}"
        return Diagnosis(kind="wrong heads", text=text)
    if _nobodys(full[wrong], int(truth.max()) + len(truth)):
        text = "is no choice: ids twice, or of no block; the attention did not run, or on no choice"
        return Diagnosis(kind="not computed", text=text)
    last = truth.amax(dim=-1)
    if bool((full.amax(dim=-1) > last)[wrong].any()):
        return Diagnosis(kind="wrong blocks", text="has blocks after the token's own")
    fewer = (full == NO_BLOCK).sum(-1) > (truth == NO_BLOCK).sum(-1)
    if bool(fewer[wrong].any()):
        return Diagnosis(kind="wrong blocks", text="has fewer blocks than the token may choose")
    rows, of = int(wrong.sum()), wrong.numel()
    text = f"{rows} of {of} choices have blocks that score less than others by more than rounding"
    return Diagnosis(kind="wrong blocks", text=text)


def _nobodys(chosen: torch.Tensor, most: int) -> bool:
    """Whether choices [N, K] are what no indexer writes: a block twice, or ids of no block.

    most: the largest id that there can be.
    """
    ascending = chosen.sort(dim=-1).values
    twice = (ascending[:, 1:] == ascending[:, :-1]) & (ascending[:, 1:] != NO_BLOCK)
    foreign = (chosen < NO_BLOCK) | (chosen > most)
    return bool((twice.any(dim=-1) | foreign.any(dim=-1)).all())


def _heads(full: torch.Tensor, truth: torch.Tensor, wrong: torch.Tensor) -> dict[int, int]:
    """For each head that is wrong, the one whose blocks it has; nothing if not all have one.

    One wrong choice alone is no evidence: there are few blocks.
    """
    found: dict[int, int] = {}
    heads = wrong.any(dim=0).nonzero().flatten().tolist()
    for head in heads if int(wrong.sum()) > 1 else []:
        rows = wrong[:, head]
        others = [h for h in range(truth.shape[1]) if h != head]
        same = [h for h in others if torch.equal(full[rows, head], truth[rows, h])]
        if not same:
            return {}
        found[head] = same[0]
    return found
