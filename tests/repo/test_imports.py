"""Imports point one way: sim and reference below, model on sim, properties on all, rankfold on top.

The rule is read from the source of every file, functions included, because a lazy import breaks it
just as well; and it is shown to fail on trees that break it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FORBIDDEN: Mapping[str, frozenset[str]] = {
    "sim": frozenset({"vllm", "model", "reference", "properties", "rankfold"}),
    "reference": frozenset({"vllm", "sim", "model", "properties", "rankfold"}),
    "model": frozenset({"reference", "properties", "rankfold"}),
    "properties": frozenset({"rankfold"}),
    "rankfold": frozenset(),
}
# The truth must not lean on anything that could share a fault with the code under test.
REFERENCE_MAY_IMPORT = frozenset({"reference", "torch", "numpy"}) | sys.stdlib_module_names


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module name) of every import, also ``import_module("literal")``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            argument = node.args[0]
            if (
                name in ("import_module", "__import__")
                and isinstance(argument, ast.Constant)
                and isinstance(argument.value, str)
            ):
                yield node.lineno, argument.value


def violations(root: Path) -> list[str]:
    """Return ``file:line: package imports module`` for every import that points the wrong way."""
    found = []
    for package, forbidden in FORBIDDEN.items():
        for path in sorted((root / package).rglob("*.py")):
            for line, module in imported_modules(path.read_text(encoding="utf-8")):
                top = module.split(".")[0]
                foreign = package == "reference" and top not in REFERENCE_MAY_IMPORT
                if top in forbidden or top in ("tests", "conftest") or foreign:
                    where = f"{path.relative_to(root).as_posix()}:{line}"
                    found.append(f"{where}: {package} imports {module}")
    return found


def test_every_import_points_down() -> None:
    """No file of the project imports what lies above it."""
    empty = [package for package in FORBIDDEN if not list((ROOT / package).rglob("*.py"))]
    assert not empty, f"packages without a file, so the rule would hold by absence: {empty}"
    assert not violations(ROOT), "\n".join(violations(ROOT))


@pytest.mark.parametrize(
    ("package", "line", "module"),
    [
        ("sim", "import vllm.config", "vllm.config"),
        ("sim", "def f():\n    from model.tiny import TinyM3", "model.tiny"),
        ("sim", "import torch, reference", "reference"),
        ("sim", "if TYPE_CHECKING:\n    from rankfold.cli import main", "rankfold.cli"),
        ("sim", "import importlib\nimportlib.import_module('vllm')", "vllm"),
        ("sim", "from tests.sim import helpers", "tests.sim"),
        ("reference", "from sim import World", "sim"),
        ("reference", "import transformers", "transformers"),
        ("model", "from reference import forward", "reference"),
        ("model", "import properties.oracle as oracle", "properties.oracle"),
        ("properties", "from rankfold import cli", "rankfold"),
    ],
)
def test_the_guard_sees_a_wrong_import(
    tmp_path: Path, package: str, line: str, module: str
) -> None:
    """Each kind of wrong import, planted in a small tree, is reported with its place."""
    bad = tmp_path / package / "deep" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text(f'"""Bad."""\n{line}\n', encoding="utf-8")
    (found,) = violations(tmp_path)
    assert found.startswith(f"{package}/deep/bad.py:")
    assert found.endswith(f"{package} imports {module}")


def test_the_guard_lets_right_imports_pass(tmp_path: Path) -> None:
    """What each package may import is not reported."""
    for package, source in {
        "sim": "import torch\nfrom . import world\nfrom sim.world import World",
        "reference": "import math, numpy, torch\nfrom .config import M3Config",
        "model": "import vllm\nfrom sim import World",
        "properties": "import vllm, sim, reference, model",
        "rankfold": "import vllm, sim, reference, model, properties",
    }.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "good.py").write_text(source, encoding="utf-8")
    assert violations(tmp_path) == []


@pytest.mark.parametrize("module", ["sim", "reference", "model", "rankfold.cli"])
def test_importing_does_not_load_vllm(module: str) -> None:
    """vLLM costs seconds to import: help, usage errors and users of sim must not pay for it."""
    code = f"import sys, {module}; print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
