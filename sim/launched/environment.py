"""What torchrun says of this process, in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HINT = "start it with torchrun, as in `torchrun --nproc-per-node 4 -m rankfold worker ...`"


class LaunchError(ValueError):
    """This process was not started as a rank; the message is one line that says how to."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process of a launch."""

    rank: int
    world_size: int
    local_rank: int
    """Among the ranks of this machine."""
    local_size: int
    """Ranks of this machine."""
    host: str
    """Of the launcher's store, where rank 0's process is too."""
    port: int

    @property
    def one_machine(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.local_size == self.world_size

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """What the environment says.

        Raises:
            LaunchError: a variable is missing, or makes no sense.
        """
        missing = [name for name in _NAMES if not environment.get(name)]
        if missing:
            raise LaunchError(f"{', '.join(missing)} not set in the environment: {_HINT}")
        numbers = {}
        for name in _NAMES:
            if name != "MASTER_ADDR":
                try:
                    numbers[name] = int(environment[name])
                except ValueError:
                    raise LaunchError(
                        f"{name}={environment[name]!r} is no number: {_HINT}"
                    ) from None
        launch = cls(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            local_size=numbers["LOCAL_WORLD_SIZE"],
            host=environment["MASTER_ADDR"],
            port=numbers["MASTER_PORT"],
        )
        if not (
            0 <= launch.rank < launch.world_size
            and 0 <= launch.local_rank < launch.local_size <= launch.world_size
        ):
            raise LaunchError(
                f"rank {launch.rank} of {launch.world_size}, on its machine {launch.local_rank} of "
                f"{launch.local_size}: {_HINT}"
            )
        return launch
