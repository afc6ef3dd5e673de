"""Settings for every test: one thread a process, quiet libraries, hypothesis profiles, skips told.

Settings that libraries read at import time are made here, before any test module is imported.
"""
# ruff: noqa: E402  (the settings must come before the imports that read them)

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Generator

for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # a test that would fetch a model must fail at once, not wait
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

import pytest
import torch
from hypothesis import HealthCheck, settings

# The folded runtime runs one rank at a time, and pytest-xdist fills the cores.
torch.set_num_threads(1)

# No deadline: building a world takes seconds the first time and milliseconds afterwards.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=25,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", deadline=None, max_examples=50)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked ``gpu(count=n)`` where there are fewer GPUs, and say so."""
    for marker in item.iter_markers("gpu"):
        need, have = marker.kwargs.get("count", 1), torch.cuda.device_count()
        if have < need:
            pytest.skip(f"needs {need} CUDA GPU(s), this machine has {have}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """A folder that leaves a world open is told here, not by whichever test comes upon its ranks.

    The workers steal tests from each other, so any folder may come after any other.
    """
    yield
    if nextitem is None or nextitem.path.parent != item.path.parent:
        left = [t.name for t in threading.enumerate() if re.fullmatch(r"rank\d+", t.name)]
        if left:
            pytest.fail(f"the tests of {item.path.parent.name} left ranks: {left}", pytrace=False)


def skip_line(reasons: list[str]) -> str:
    """Return the line that counts skipped tests by reason, most frequent first."""
    counted = "; ".join(f"{n} x {reason}" for reason, n in Counter(reasons).most_common())
    return f"tests skipped: {len(reasons)}" + (f" ({counted})" if counted else "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end how many tests were skipped and why, also when none was."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [
        report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in skipped
    ]
    terminalreporter.write_line(skip_line([reason.removeprefix("Skipped: ") for reason in reasons]))
