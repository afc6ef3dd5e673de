"""Ctrl-C ends a run at once, whatever its ranks are doing, and leaves the process usable.

The scenarios run in a process of their own, which sends itself SIGINT at known points.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.sim.programs import ROOT

SCENARIOS = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from sim import RankSlot, World
from tests.sim.programs import rank_threads, total_of_ranks

def interrupt():
    sum(range(1_000_000))  # by now the main thread sleeps in World.run
    os.kill(os.getpid(), signal.SIGINT)

def computes(ctx):
    interrupt()
    while True:
        sum(range(100))

def waits(ctx):
    if ctx.rank == 0:
        dist.barrier()
    interrupt()
    while True:
        sum(range(100))

def communicates(ctx):
    x = torch.ones(1)
    if ctx.rank == 0:
        interrupt()
    while True:
        dist.all_reduce(x)

def suppresses(ctx):
    interrupt()
    while True:
        try:
            sum(range(100))
        except Exception:
            pass

def ended(program, **options):
    world = World("tp2", **options)
    start = time.perf_counter()
    try:
        world.run(program)
    except KeyboardInterrupt:
        seconds = time.perf_counter() - start
    world.close()
    assert seconds < 3, seconds
    assert rank_threads() == [], rank_threads()
    with World("tp2") as after:
        assert after.run(total_of_ranks) == [1.0, 1.0]
    print(program.__name__, flush=True)

for program in (computes, waits, suppresses, *[communicates] * 5):
    ended(program)
    ended(program, seed=1)

armed = False

def get():
    global armed
    if armed and threading.current_thread().name == "rank0":
        armed = False
        interrupt()
        sum(1 for _ in range(1_000_000))  # the interrupt is noticed here
    return 0

def is_at_its_end(ctx):
    global armed
    armed = armed or ctx.rank == 0

ended(is_at_its_end, rank_local=[RankSlot("slow to read", get, lambda value: None, "a test")])

with World("tp2") as world:
    world.run(computes)  # and nobody catches it
"""


def test_an_interrupt_ends_the_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCENARIOS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    ended = ["computes", "waits", "suppresses", *["communicates"] * 5]
    twice = [name for name in ended for _ in range(2)]
    assert done.stdout.split() == [*twice, "is_at_its_end"], done.stderr
    assert done.returncode == -signal.SIGINT
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
