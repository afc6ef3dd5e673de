"""What conftest.py and pyproject.toml promise about a test run: skips are told, hangs end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


# A torch that loads at once and has no GPU: these tests are about pytest.
TORCH = """
from types import SimpleNamespace
cuda = SimpleNamespace(device_count=lambda: 0)
def set_num_threads(n): pass
"""


def run_pytest(tmp_path: Path, body: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on one small file with one xdist worker, under this project's settings."""
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_small.py").write_text("import time, pytest\n" + body)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", *args],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


SKIPS = """
@pytest.mark.gpu(count=2)
def test_needs_gpus(): raise AssertionError

@pytest.mark.parametrize("n", [1, 2])
def test_skips(n): pytest.skip("no network here")

def test_passes(): pass
"""


def test_skips_are_counted_with_their_reason(tmp_path: Path) -> None:
    """The end of the run says how many tests were skipped and why, most frequent first."""
    run = run_pytest(tmp_path, SKIPS)
    assert run.returncode == 0, run.stdout
    (line,) = [x for x in run.stdout.splitlines() if x.startswith("tests skipped:")]
    assert line.startswith("tests skipped: 3 (2 x no network here; 1 x needs 2 CUDA GPU(s), ")


def test_a_hung_test_ends_and_is_named(tmp_path: Path) -> None:
    """The time limit ends the worker of a hung test; the others still run, none skipped."""
    body = "def test_hangs(): time.sleep(100)\ndef test_passes(): pass\n"
    run = run_pytest(tmp_path, body, "-o", "faulthandler_timeout=1")
    assert run.returncode == 1, run.stdout
    assert "FAILED tests/test_small.py::test_hangs" in run.stdout
    assert "1 failed, 1 passed" in run.stdout
    assert "tests skipped: 0" in run.stdout.splitlines()
