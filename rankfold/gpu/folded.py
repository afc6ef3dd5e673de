"""The same steps on folded ranks, on this machine's CPU."""

from __future__ import annotations

from dataclasses import replace

from model.subject import prepare
from rankfold.gpu.plan import Plan
from rankfold.gpu.record import Measured, batch_of, measure
from rankfold.rig import Rig


def folded(plan: Plan) -> dict[str, Measured]:
    """Each variant's step, judged.

    Raises:
        SimError: the ranks broke; the code under test is wrong, whatever the transport.
    """
    prepare()
    found = {}
    with Rig(worlds=1) as rig:
        for name, launched in plan.variants:
            options = replace(launched, transport="folded")
            batch = batch_of(options)
            outcome = rig.step(options, batch)
            if outcome.broke is not None:
                raise outcome.broke
            found[name] = measure(options, batch, replace(outcome, findings=None))
    return found
