"""The shape of the tree: short files with a docstring, and no trace of the machine it grew on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE_LIMIT = 350  # hard; the aim is under 300, so that a file fits in one sitting
PLACES = ("sim", "reference", "model", "properties", "rankfold", "scripts", "tests")
GENERATED = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis"}
GENERATED |= {".mypy_cache", ".pytest_cache", ".ruff_cache", "shared"}
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".cfg", ".ini", ".sh", ""}

# Put together from pieces, so that this file does not hold what it looks for.
MACHINE_PATHS = tuple("/" + "/".join(parts) for parts in (
    ("work", ""), ("root", ""), ("tmp", "venv"), ("tmp", "brief"), ("opt", "wheels"),
    ("opt", "pypi"), ("home", "[a-z]"), ("Users", "[A-Za-z]"),
))  # fmt: skip
HOSTS = tuple(r"\.".join(parts) for parts in (
    ("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org"),
    ("deb", "debian", "org"), ("registry", "npmjs", "org"), ("wheels", "vllm", "ai"),
))  # fmt: skip
TRACES = re.compile(
    "|".join([*(rf"(?<![\w.]){path}" for path in MACHINE_PATHS), *(rf"\b{host}" for host in HOSTS)])
)


def python_files(root: Path) -> list[Path]:
    """Return every Python file of the project's own folders, and conftest.py."""
    return sorted([*root.glob("*.py"), *(p for d in PLACES for p in (root / d).rglob("*.py"))])


def text_files(root: Path) -> Iterator[Path]:
    """Yield every text file of the tree that is not generated."""
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        generated = any(part in GENERATED or part.endswith(".egg-info") for part in parts)
        if not generated and path.is_file() and path.suffix in TEXT:
            yield path


def layout_faults(path: Path) -> list[str]:
    """Return what is wrong with one Python file: too long, or without a module docstring."""
    source = path.read_text(encoding="utf-8")
    lines = len(source.splitlines())
    faults = []
    if lines > LINE_LIMIT:
        faults.append(f"{lines} lines, more than {LINE_LIMIT}: split it by reason to exist")
    if not ast.get_docstring(ast.parse(source)):
        faults.append("no module docstring: say what it is for, and why")
    return faults


def traces(path: Path) -> list[str]:
    """Return the lines of a text file that name a machine's path or a registry's host."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [f"{n}: {line.strip()}" for n, line in enumerate(lines, 1) if TRACES.search(line)]


def test_python_files_are_short_and_documented() -> None:
    """Every module fits in one sitting and says what it is for."""
    files = python_files(ROOT)
    assert Path(__file__) in files
    faults = [f"{path.relative_to(ROOT)}: {f}" for path in files for f in layout_faults(path)]
    assert not faults, "\n".join(faults)


def test_no_file_names_a_machine_or_a_registry() -> None:
    """A clone must work anywhere, with whichever index its pip is set to."""
    files = list(text_files(ROOT))
    assert ROOT / "Makefile" in files
    assert ROOT / ".ci" / "run" in files
    found = [f"{path.relative_to(ROOT)}:{trace}" for path in files for trace in traces(path)]
    assert not found, "\n".join(found)


def test_the_layout_check_sees_faults(tmp_path: Path) -> None:
    """A long file and one without docstring are reported; a good one is not."""
    path = tmp_path / "a.py"
    path.write_text("x = 1\n" * (LINE_LIMIT + 1), encoding="utf-8")
    assert len(layout_faults(path)) == 2
    path.write_text('"""What it is for."""\n' * LINE_LIMIT, encoding="utf-8")
    assert layout_faults(path) == []


@pytest.mark.parametrize(
    "line",
    [
        "cd /" + "work/main",
        "PYTHON=/tmp" + "/venv/bin/python",
        "'/" + "home/ada/rankfold'",
        "https://pypi" + ".org/simple",
        "https://download.pytorch" + ".org/whl/cpu",
    ],
)
def test_the_trace_check_sees_traces(tmp_path: Path, line: str) -> None:
    """Each kind of trace is found, and ordinary text that resembles one is not."""
    path = tmp_path / "a.md"
    path.write_text(f"fine\n{line}\nalso fine: framework/model, a/work/b, pypi, pytorch.org\n")
    assert traces(path) == [f"2: {line}"]
