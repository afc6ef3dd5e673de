"""What full-scale results have to reach, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rankfold.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Each can be set on the command line: `--threshold gsm8k=0.92`."""

    gsm8k: float = 0.90
    """Least accuracy on GSM8K."""
    logprob_delta: float = 0.0
    """Largest difference of any prompt logprob between stage counts: 0 is bit for bit."""
    throughput_loss: float = 0.05
    """Largest part of the other arm's mean throughput that an arm may lack. The runs of one arm
    have been seen 5 % apart on one machine."""

    @classmethod
    def of(cls, settings: Sequence[str]) -> Thresholds:
        """The defaults with some set anew.

        Args:
            settings: as "name=value".

        Raises:
            UsageError: no threshold has that name, or the value is no number from 0 to 1.
        """
        names = [field.name for field in fields(cls)]
        values = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if name not in names or not 0 <= value <= 1:
                raise UsageError(
                    f"--threshold {setting!r}: use NAME=VALUE with a value from 0 to 1 and one of "
                    f"the names {', '.join(names)}"
                )
            values[name] = value
        return cls(**values)
