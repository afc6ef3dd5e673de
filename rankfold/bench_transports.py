"""`rankfold bench`: folded ranks against processes over gloo, per step and per start of a world."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

ROUNDS = 5
STEPS = 5


def transports_rounds(words: Sequence[str]) -> dict[str, dict[str, float]]:
    """Measure each topology on both transports, in interleaved rounds.

    Returns:
        For each topology medians: milliseconds of a step (the real model, 8 tokens, taps and
        poison as in a check) and of a world's start, and the seconds until the first world over
        gloo had its ranks, vLLM's import in their zygote included.
    """
    from model.batch import Batch
    from model.subject import prepare
    from rankfold.options import Options
    from rankfold.processes import RankProcesses, new_pool
    from rankfold.rig import Rig, Stand
    from sim import Topology

    began = time.perf_counter()
    with new_pool() as pool:
        processes = RankProcesses(pool)
        pool.warm(4)
        cold = time.perf_counter() - began
        prepare()
        figures = {}
        for word in words:
            topology = Topology.parse(word)
            options = Options(topology=topology)
            batch = Batch.random(options.tokens, options.tiny.vocab_size, seed=0)
            steps: dict[str, list[float]] = {"folded": [], "gloo": []}
            starts: dict[str, list[float]] = {"folded": [], "gloo": []}
            pool.warm(topology.world_size)
            of = {"folded": None, "gloo": processes}
            with Rig() as folded, Rig(processes=processes) as gloo:
                for name, its in of.items():
                    for _ in range(ROUNDS):
                        start = time.perf_counter()
                        stand = Stand(topology, 1, its)
                        starts[name].append(time.perf_counter() - start)
                        stand.close()
                rigs = {"folded": folded, "gloo": gloo}
                for rig in rigs.values():
                    rig.step(options, batch)
                for _ in range(ROUNDS):
                    for name, rig in rigs.items():
                        start = time.perf_counter()
                        for _ in range(STEPS):
                            rig.step(options, batch)
                        steps[name].append((time.perf_counter() - start) / STEPS)
            ratios = [g / f for g, f in zip(steps["gloo"], steps["folded"], strict=True)]
            figures[word] = {
                **{f"{n}_step_ms": statistics.median(s) * 1e3 for n, s in steps.items()},
                **{f"{n}_start_ms": statistics.median(s) * 1e3 for n, s in starts.items()},
                "step_ratio": statistics.median(ratios),
                "gloo_cold_s": cold,
            }
    return figures
