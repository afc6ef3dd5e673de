"""What the checks ask of a tap."""

from __future__ import annotations

from typing import Protocol

import torch


class Captured(Protocol):
    """One tap on one rank: its local value, and how the code itself declares it placed."""

    @property
    def value(self) -> torch.Tensor: ...
    @property
    def declared(self) -> str: ...
