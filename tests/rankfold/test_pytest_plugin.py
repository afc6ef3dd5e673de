"""The plugin is light, is found by its entry point, works under xdist, and says what it needs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.rankfold.pytest_runs import PLUGIN, ROOT, run_pytest

pytestmark = pytest.mark.slow

NO_TORCH = """
import sys

def test_no_library_was_imported():
    heavy = {"torch", "vllm", "hypothesis", "numpy", "sim", "model", "properties"}
    assert not heavy & set(sys.modules)
"""
IN_WORLD = """
import pytest
import torch
import torch.distributed as dist

@pytest.mark.parametrize("n", range(6))
def test_sum(world, n):
    def program(ctx):
        x = torch.full((2,), ctx.rank + 0.5 + n)
        dist.all_reduce(x)
        return x

    assert world("tp2").run(program)[1].tolist() == [2.0 + 2 * n] * 2

@pytest.mark.rankfold_allow("equal addends", "test_user.py", "halved below")
def test_mean(world):
    def program(ctx):
        x = torch.arange(4) + 0.5
        dist.all_reduce(x)
        return x * 0.5

    world("tp2").run(program)
"""


@pytest.fixture
def announced(tmp_path: Path) -> Path:
    """A folder for Python's path that announces what pyproject.toml does, as an installation."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"{name} = {target}" for name, target in points["pytest11"].items()]
    info = tmp_path / "site" / "rankfold_announced-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rankfold-announced\nVersion: 1\n")
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    return info.parent


@pytest.mark.parametrize("by", ["entry point", "-p"])
def test_a_run_that_does_not_use_it_imports_no_library(
    tmp_path: Path, announced: Path, by: str
) -> None:
    (tmp_path / "test_user.py").write_text(NO_TORCH)
    off = ("-p", "no:hypothesispytest", "-p", "no:anyio")
    if by == "-p":
        run = run_pytest(tmp_path, *PLUGIN, "test_user.py")
    else:
        run = run_pytest(tmp_path, *off, "test_user.py", paths=(announced,), plugins=True)
        assert "rankfold" in run.output.split("plugins: ")[1].splitlines()[0]
    assert run.code == 0, run.output


def test_the_entry_point_and_the_option_do_not_clash(tmp_path: Path, announced: Path) -> None:
    (tmp_path / "test_user.py").write_text(IN_WORLD)
    run = run_pytest(tmp_path, *PLUGIN, "test_user.py", paths=(announced,), plugins=True)
    assert run.code == 0, run.output
    assert "7 passed" in run.output


def test_xdist_spreads_the_tests_and_tells_what_was_allowed(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(IN_WORLD)
    run = run_pytest(tmp_path, *PLUGIN, "-p", "xdist", "-n", "2", "test_user.py")
    assert run.code == 0, run.output
    assert "7 passed" in run.output
    allowed = "rankfold allowed equal addends at test_user.py:"
    assert [line for line in run.output.splitlines() if line.startswith(allowed)]


def test_the_marker_and_the_setting_are_registered(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text("def test_nothing(): pass\n")
    assert "rankfold_allow(rule, site, reason)" in run_pytest(tmp_path, *PLUGIN, "--markers").output
    assert "rankfold_vllm (bool)" in run_pytest(tmp_path, *PLUGIN, "-h").output


TOO_EARLY = """
import vllm.platforms
from vllm.platforms.interface import UnspecifiedPlatform

# What importing model code does on a machine for which vLLM has a platform, or has none.
vllm.platforms._current_platform = UnspecifiedPlatform()

def test_layer(vllm_world):
    vllm_world("tp2")
"""


def test_vllm_that_was_imported_too_early_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(TOO_EARLY)
    run = run_pytest(tmp_path, *PLUGIN, "test_user.py")
    assert run.code == 1
    line = (
        "rankfold: vLLM already runs on UnspecifiedPlatform: its model code was imported too "
        "early. Set rankfold_vllm = true in pytest's settings, or run pytest --rankfold-vllm"
    )
    assert line in run.output.splitlines(), run.output


NO_VLLM = 'raise ModuleNotFoundError("No module named \'vllm\'", name="vllm")\n'


@pytest.mark.parametrize("asked", ["by the fixture", "by the option"])
def test_a_missing_vllm_is_told_in_one_line(tmp_path: Path, asked: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "vllm.py").write_text(NO_VLLM)
    (tmp_path / "test_user.py").write_text("def test_layer(vllm_world): vllm_world('tp2')\n")
    option = ("--rankfold-vllm",) if asked == "by the option" else ()
    run = run_pytest(tmp_path, *PLUGIN, *option, "test_user.py", paths=(tmp_path / "site",))
    assert run.code == (4 if option else 1), run.output
    told = "rankfold: vLLM is not installed: install it, or put a checkout on PYTHONPATH"
    assert [line for line in run.output.splitlines() if line.endswith(told)], run.output
    assert "Traceback" not in run.output
