"""Known bugs that can be switched on: what the checks have to catch.

| file | what it is |
|---|---|
| fault.py | `Fault`: its name, mechanism, public report, where it shows, how it is switched on |
| overlay.py | single pieces of sequence parallelism across stages, undone |
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from properties.faults import overlay
from properties.faults.fault import Fault, UnknownFault

FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in (*overlay.FAULTS,)}
"""Every fault by its name."""


def find(name: str) -> Fault:
    """The fault of this name.

    Raises:
        UnknownFault: there is none.
    """
    if name in FAULTS:
        return FAULTS[name]
    near = difflib.get_close_matches(name, FAULTS, n=3, cutoff=0.4)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise UnknownFault(f"no fault is called {name!r}{hint} (rankfold faults --list shows all)")


__all__ = ["FAULTS", "Fault", "UnknownFault", "find"]
