"""What a command needs before it can run steps: vLLM, ranks, and a rig on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from model import overlay
from model.subject import check, prepare
from properties.faults import find
from rankfold.errors import UsageError
from rankfold.options import LAUNCHED, Options
from rankfold.processes import are_launched, rank_processes
from rankfold.rig import Rig
from rankfold.run import Progress


@contextmanager
def ready_rig(
    options: Options, progress: Progress, fault: str | None = None, worlds: int | None = None
) -> Iterator[Rig]:
    """A rig for these options, with a fault switched on if one is named.

    worlds: most that it keeps; see `Rig`.

    Raises:
        UsageError, ShapeError, TopologyError: the options make no sense.
    """
    # Ranks take turns, so one rank's math threads would only get in the way of the next one's.
    torch.set_num_threads(1)
    for topology in filter(None, (options.topology, options.against, *options.also)):
        check(options.tiny, topology)
    progress("importing vLLM")
    with ExitStack() as stack:
        processes = None
        if options.transport != "folded":
            if options.transport in LAUNCHED and not are_launched():
                raise UsageError(
                    f"--transport {options.transport}: start the ranks with torchrun, as in "
                    "torchrun --nproc-per-node 4 -m rankfold worker check tep4"
                )
            processes = stack.enter_context(rank_processes(fault))
        if processes is None or options.sp == "off":
            prepare()
        if options.sp == "off" and not overlay.needed():
            raise UsageError(
                "--sp off: the installed vLLM has sequence parallelism of its own; use auto"
            )
        if fault is not None and processes is None:
            stack.enter_context(find(fault).apply())
        yield stack.enter_context(Rig(processes=processes, worlds=worlds))
