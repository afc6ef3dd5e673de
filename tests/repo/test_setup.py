"""The set-up script's decisions: the stamp, whose interpreter is used, pip's steps, error lines."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "setup.py"


def load_script() -> ModuleType:
    """Import scripts/setup.py, which is no package's module."""
    spec = importlib.util.spec_from_file_location("rankfold_setup", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load_script()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that decide what is installed."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run_script(tree: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the tree's set-up script with no offered environment but those in ``env``."""
    offered = ("RANKFOLD_PYTHON", "VIRTUAL_ENV", "PYTHONPATH")
    base = {key: value for key, value in os.environ.items() if key not in offered}
    return subprocess.run(
        [sys.executable, str(tree / "scripts" / "setup.py"), *args],
        env=base | env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def fake_python(path: Path, *, missing: str = "", version: str = "3 12") -> Path:
    """Write a program that answers the script's probe as a Python with gaps would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version} {missing}\n")
    path.chmod(0o755)
    return path


def test_stamp_follows_every_input(tree: Path) -> None:
    """The stamp is stable, and moves with each file, the Python version and the place."""
    first = setup.fingerprint(tree, (3, 11))
    assert setup.fingerprint(tree, (3, 11)) == first
    assert setup.fingerprint(tree, (3, 12)).splitlines()[0] != first.splitlines()[0]
    seen = {first}
    inputs = [*tree.glob("requirements/*.txt"), tree / "pyproject.toml", tree / "scripts/setup.py"]
    assert len(inputs) == 8
    for path in inputs:
        path.write_text(path.read_text() + "\n")
        seen.add(setup.fingerprint(tree, (3, 11)))
    assert len(seen) == 1 + len(inputs)
    assert {stamp.splitlines()[0] for stamp in seen} == {first.splitlines()[0]}


def test_a_fitting_stamp_is_all_it_takes(tree: Path) -> None:
    """With a stamp that fits, the script prints the interpreter and says nothing else."""
    python = fake_python(tree / ".venv" / "bin" / "python")
    (tree / ".venv" / "stamp").write_text(setup.fingerprint(tree, sys.version_info[:2]))
    run = run_script(tree, "check")
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{python}\n", "")


def test_a_failed_set_up_leaves_no_stamp(tree: Path) -> None:
    """When pip fails, the old stamp is gone, and pip's own error is shown in one line."""
    python = fake_python(tree / ".venv" / "bin" / "python")
    python.write_text("#!/bin/sh\necho 'Collecting torch'\necho 'ERROR: disk is full'\nexit 1\n")
    stamp = tree / ".venv" / "stamp"
    this_venv = setup.fingerprint(tree, sys.version_info[:2]).splitlines()[0]
    stamp.write_text(this_venv + "\nof other requirements\n")
    (tree / ".venv" / "setup.log").touch()
    run = run_script(tree, "check")
    assert (run.returncode, run.stdout) == (2, "")
    assert not stamp.exists()
    last = run.stderr.splitlines()[-1]
    assert last.startswith("rankfold: pip failed at: PyTorch")
    assert "ERROR: disk is full" in last
    assert "Collecting" not in last


def test_a_foreign_venv_is_left_alone(tree: Path) -> None:
    """A .venv that this set-up did not make is neither used nor removed."""
    keep = tree / ".venv" / "precious"
    keep.parent.mkdir()
    keep.touch()
    run = run_script(tree, "check")
    assert run.returncode == 2
    assert keep.exists()
    (line,) = run.stderr.splitlines()
    assert "not made by this set-up" in line


def test_named_interpreter_is_used_as_it_is(tree: Path) -> None:
    """RANKFOLD_PYTHON wins over an active environment, and no .venv is made."""
    named = fake_python(tree / "named" / "python")
    active = fake_python(tree / "active" / "bin" / "python")
    run = run_script(tree, "check", RANKFOLD_PYTHON=str(named), VIRTUAL_ENV=str(active.parents[1]))
    assert (run.returncode, run.stdout) == (0, f"{named}\n")
    assert not (tree / ".venv").exists()


def test_active_environment_with_vllm_is_used(tree: Path) -> None:
    """An active environment that has vLLM is used as it is."""
    active = fake_python(tree / "active" / "bin" / "python")
    run = run_script(tree, "check", VIRTUAL_ENV=str(active.parents[1]))
    assert (run.returncode, run.stdout) == (0, f"{active}\n")


def test_active_environment_without_vllm_is_passed_over(tree: Path) -> None:
    """An active environment without vLLM, or our own .venv, does not stand in the way."""
    active = fake_python(tree / "active" / "bin" / "python", missing="vllm torch")
    own = fake_python(tree / ".venv" / "bin" / "python")
    (tree / ".venv" / "setup.log").touch()
    (tree / ".venv" / "stamp").write_text(setup.fingerprint(tree, sys.version_info[:2]))
    for path in (active, own):
        run = run_script(tree, "check", VIRTUAL_ENV=str(path.parents[1]))
        assert (run.returncode, run.stdout, run.stderr) == (0, f"{own}\n", "")


@pytest.mark.parametrize(
    ("missing", "version", "expected"),
    [
        (
            "xdist yaml",
            "3 12",
            "lacks yaml, xdist; add with: {} -m pip install PyYAML pytest-xdist",
        ),
        ("vllm", "3 12", "{} lacks vllm; add with: {} -m pip install vllm"),
        ("", "3 10", "{}: Python 3.10 is too old: rankfold needs 3.11 to 3.14"),
        ("", "3 15", "{}: Python 3.15 is too new: rankfold needs 3.11 to 3.14"),
        ("; exit 1", "", "{} is not a Python that runs"),
    ],
)
def test_what_a_named_interpreter_lacks(
    tree: Path, missing: str, version: str, expected: str
) -> None:
    """One line says what is wrong with RANKFOLD_PYTHON, and what would be right."""
    named = fake_python(tree / "python", missing=missing, version=version)
    run = run_script(tree, "test", RANKFOLD_PYTHON=str(named))
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert expected.replace("{}", str(named)) in line


def test_a_named_interpreter_that_is_not_there(tree: Path) -> None:
    """A wrong path in RANKFOLD_PYTHON is an error, not a reason to install."""
    run = run_script(tree, "check", RANKFOLD_PYTHON=str(tree / "nowhere"))
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert "is not a program that can be run" in line


def test_check_needs_no_test_tools(tree: Path) -> None:
    """An interpreter without pytest, ruff and mypy serves `make check`, not `make test`."""
    named = str(fake_python(tree / "python", missing="pytest xdist ruff mypy"))
    assert run_script(tree, "check", RANKFOLD_PYTHON=named).returncode == 0
    assert run_script(tree, "test", RANKFOLD_PYTHON=named).returncode == 2


def test_python_versions() -> None:
    """3.11 to 3.14 fit; the line for others names the range and the way out."""
    assert [v for v in range(8, 17) if setup.python_problem((3, v)) is None] == [11, 12, 13, 14]
    assert "make PYTHON=" in setup.python_problem((3, 9))


def test_an_old_python_can_parse_the_script() -> None:
    """The line "too old" can be shown by Python 3.8: the file must parse there."""
    ast.parse(SCRIPT.read_text(), feature_version=(3, 8))


def test_pip_steps_on_linux_and_mac() -> None:
    """torch comes first, vLLM never with its dependencies, and on a Mac by unpacking."""
    linux, mac = (setup.steps(platform, ROOT, Path("site"), "") for platform in ("linux", "darwin"))
    assert linux[0].args == ("-r", str(ROOT / "requirements" / "torch.txt"))
    assert linux[2].args == ("--no-deps", "-r", str(ROOT / "requirements" / "vllm.txt"))
    changed = [after.args for before, after in zip(linux, mac, strict=True) if before != after]
    (unpacked,) = changed
    assert unpacked[:3] == linux[2].args
    assert unpacked[3:5] == ("--platform", setup.LINUX_WHEEL)
    assert unpacked[-2:] == ("--target", "site")


def test_torch_index_reaches_torch_and_its_companions_only() -> None:
    """RANKFOLD_TORCH_INDEX must not redirect vLLM or the tools."""
    index = "https://mirror.example/cpu"
    with_index = [index in step.args for step in setup.steps("linux", ROOT, Path("s"), index)]
    assert with_index == [True, False, False, True, False, False]


def test_pip_failure_without_an_error_line_shows_the_end(tmp_path: Path) -> None:
    """Where pip prints no ERROR, its last three lines are shown."""
    line = setup.pip_failure("tools", "one\n\ntwo\nthree\nfour\n", tmp_path / "log")
    assert "two | three | four" in line
    assert "one" not in line


def test_requirements_cover_the_declared_dependencies() -> None:
    """`pip install -e . --no-deps` is right only if requirements/ holds every dependency."""
    lines = [
        line for path in (ROOT / "requirements").glob("*.txt")
        for line in path.read_text().splitlines() if line and not line.startswith("#")
    ]  # fmt: skip
    pinned = {Requirement(line).name.lower() for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {Requirement(line).name.lower() for line in project["dependencies"]}
    assert declared <= pinned
