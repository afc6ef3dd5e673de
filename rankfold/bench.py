"""`rankfold bench`: what folding costs, as ratios within one run.

Machines differ and are noisy, so the figures to quote are the ratios, each the median of
interleaved rounds.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rankfold.bench_deployments import deployment_rounds, said
from rankfold.bench_transports import transports_rounds
from rankfold.errors import HOLDS
from sim import RankContext, Topology, World, transport_clock

ROUNDS = 5
CALLS = 300
STEPS = 20


def run_bench(*, as_json: bool) -> int:
    """Measure and print; returns the exit code."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {
        "all_reduce": _all_reduce_rounds(),
        "step": _step_rounds("tep4pp2"),
        "transports": transports_rounds(("tep2pp2", "tep4pp2")),
        "data_parallel": deployment_rounds(),
    }
    if as_json:
        print(json.dumps(figures, indent=2))
        return HOLDS
    reduce, step = figures["all_reduce"], figures["step"]
    print(
        f"all_reduce, 64 x 64 float32, 4 ranks: folded {reduce['folded_us']:.0f} us, "
        f"torch's multi_threaded_pg {reduce['threaded_us']:.0f} us: "
        f"{reduce['ratio']:.2f} x (median of {ROUNDS} rounds)"
    )
    print(
        f"step, {step['topology']}, 8 tokens: {step['step_ms']:.1f} ms, of which the ranks' own "
        f"compute {step['own_ms']:.1f} ms: {step['ratio']:.2f} x (median of {ROUNDS} rounds)"
    )
    for word, of in figures["transports"].items():
        print(
            f"gloo against folded, {word}: step {of['gloo_step_ms']:.1f} ms against "
            f"{of['folded_step_ms']:.1f} ms: {of['step_ratio']:.2f} x; start of a world "
            f"{of['gloo_start_ms']:.0f} ms from the warm pool against {of['folded_start_ms']:.0f} "
            f"ms; first start {of['gloo_cold_s']:.1f} s"
        )
    for line in said(figures["data_parallel"]):
        print(line)
    return HOLDS


def _all_reduce_rounds() -> dict[str, float]:
    folded, threaded = [], []
    for _ in range(ROUNDS):
        with World(4) as world:
            folded.append(max(world.run(_time_all_reduce)))
        threaded.append(_threaded(4))
    ratios = [a / b for a, b in zip(folded, threaded, strict=True)]
    return {
        "folded_us": statistics.median(folded) * 1e6,
        "threaded_us": statistics.median(threaded) * 1e6,
        "ratio": statistics.median(ratios),
    }


def _time_all_reduce(ctx: RankContext | None = None) -> float:
    """Seconds a call."""
    x = torch.ones(64, 64)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        dist.all_reduce(x)
    return (time.perf_counter() - start) / CALLS


def _threaded(size: int) -> float:
    """The same loop on torch's own threaded group: one thread a rank, with locks."""
    from torch.testing._internal.distributed import multi_threaded_pg

    store, seconds = HashStore(), [0.0] * size

    def rank_main(rank: int) -> None:
        dist.init_process_group("threaded", store=store, rank=rank, world_size=size)
        seconds[rank] = _time_all_reduce()
        dist.destroy_process_group()

    with _threaded_groups(multi_threaded_pg):
        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return max(seconds)


@contextmanager
def _threaded_groups(multi_threaded_pg: Any) -> Iterator[None]:
    extension: Any = torch._C._distributed_c10d
    multi_threaded_pg._install_threaded_pg()
    extension._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        extension._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()


def _step_rounds(word: str) -> dict[str, Any]:
    """A step of the real model: its time against the sum of what the ranks compute themselves.

    A rank's own compute is the time it runs outside of the folded transport: torch's and vLLM's
    code, including their Python around each collective.
    """
    from model.batch import Batch
    from model.rank_state import RANK_LOCAL
    from model.subject import prepare
    from rankfold.options import Options
    from rankfold.run import PLUMBING, build, full_checkpoint

    prepare()
    options = Options(topology=Topology.parse(word))
    weights = full_checkpoint(options)
    batch = Batch.random(options.tokens, options.tiny.vocab_size, seed=0)
    with World(word, rank_local=RANK_LOCAL, plumbing=PLUMBING) as world:
        subjects = world.run(build, options, weights)
        steps: Callable[[RankContext], list[Any]] = lambda ctx: [  # noqa: E731
            subjects[ctx.rank].step(batch, capture=False) for _ in range(STEPS)
        ]
        world.run(steps)
        totals, owns = [], []
        for _ in range(ROUNDS):
            with transport_clock() as transport:
                start = time.perf_counter()
                world.run(steps)
                total = time.perf_counter() - start
            totals.append(total / STEPS)
            owns.append((total - transport.seconds) / STEPS)
    ratios = [total / own for total, own in zip(totals, owns, strict=True)]
    return {
        "topology": word,
        "step_ms": statistics.median(totals) * 1e3,
        "own_ms": statistics.median(owns) * 1e3,
        "ratio": statistics.median(ratios),
    }
