"""Independent float64 MiniMax-M3 on one rank, its rounding bounds, and numpy collectives.

What every subject is measured against. Nothing here imports vLLM, the simulator or the model
under test: a shared line could hide a shared mistake.

Shape legend used throughout: P probes (probe 0 is exact), T tokens, H hidden, N query heads,
G key/value heads, D head dim, E experts, K experts per token, I FFN width, V vocabulary,
R ranks. Sparse attention has as many index heads as key/value heads (G), B blocks of keys, and K
blocks per token and index head.
"""

from reference.bounds import Bounds, bounds
from reference.config import M3Config
from reference.model import Batch, Result, Taps, forward
from reference.mtp import draft, draft_bounds, draft_shapes
from reference.rounding import EXACT, Kind, Perturbed, Rounding, gamma, unit_roundoff
from reference.weights import as_float64, expected_shapes

__all__ = [
    "EXACT",
    "Batch",
    "Bounds",
    "Kind",
    "M3Config",
    "Perturbed",
    "Result",
    "Rounding",
    "Taps",
    "as_float64",
    "bounds",
    "draft",
    "draft_bounds",
    "draft_shapes",
    "expected_shapes",
    "forward",
    "gamma",
    "unit_roundoff",
]
