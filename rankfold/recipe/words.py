"""Topology words of the field, as degrees: dep16, tep8, tp4, tep8pp2, tp4ep4, dp2tp4.

`sim.Topology` reads the words that a world can be made of; names and comments of recipes have a few
more (`tp4ep4`, `TP1 DP8 EP`, `DEP=8`), and reading them must not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_DEGREE = 4096
"""No deployment has more ranks; larger numbers in names are something else."""

PART = r"(?:dep|tep|tp|pp|dp|ep)[ =-]?\d{1,4}"
"""One axis with its degree, in lower case."""
WORD = rf"{PART}(?:(?:ep|pp|tp|dp)\d{{1,4}})*(?![a-z0-9])"
"""A topology word, in lower case."""
_PARTS = re.compile(r"(dep|tep|tp|pp|dp|ep)[ =-]?(\d{1,4})")


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How one worker is parallel.

    Invariant: it has `tp * pp * dp` GPUs. Context parallelism is not part of a word.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False
    """Whether experts are spread over the DP x TP ranks."""

    @property
    def gpus(self) -> int:
        """GPUs of a worker."""
        return self.tp * self.pp * self.dp

    @property
    def word(self) -> str:
        """The word that recipes use: dep16, tep8pp2, dp2tp4."""
        text = ""
        if self.dp > 1 or (self.ep and self.tp == 1):
            text += f"dep{self.dp}" if self.ep and self.tp == 1 else f"dp{self.dp}"
        if self.tp > 1:
            text += f"tep{self.tp}" if self.ep else f"tp{self.tp}"
        if self.pp > 1:
            text += f"pp{self.pp}"
        return text or "tp1"


def degrees_of(word: str) -> Degrees | None:
    """The degrees of a word; None if it contradicts itself, or has a degree that cannot be."""
    tp = pp = dp = ep = 0
    spread = False
    for axis, digits in _PARTS.findall(word.lower()):
        n = int(digits)
        if not 1 <= n <= MAX_DEGREE:
            return None
        if axis == "dep":
            dp, spread = n, True
        elif axis == "tep":
            tp, spread = n, True
        elif axis == "tp":
            tp = n
        elif axis == "pp":
            pp = n
        elif axis == "dp":
            dp = n
        else:
            ep = n
    if not (tp or pp or dp):
        return None
    tp, pp, dp = tp or 1, pp or 1, dp or 1
    if ep > 1:
        if ep != tp * dp:
            return None
        spread = True
    return Degrees(tp=tp, pp=pp, dp=dp, ep=spread)
