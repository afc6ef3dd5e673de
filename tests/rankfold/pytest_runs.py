"""Runs a user's test files with pytest in a process of its own, outside of this project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "rankfold.pytest_plugin")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run of pytest said."""

    code: int
    output: str

    def outcome(self, test: str) -> str:
        """ "PASSED", "FAILED", "SKIPPED" or "ERROR"."""
        found = re.search(rf"::{re.escape(test)} (?:<- \S+ )?([A-Z]+)", self.output)
        if found is None:
            found = re.search(rf"([A-Z]+) \S+::{re.escape(test)}\b", self.output)
        assert found, f"{test} did not run:\n{self.output}"
        return found[1]

    def failure(self, test: str) -> str:
        """What pytest prints of a failed test, between its headline and the next one's."""
        found = re.search(rf"^_+ {re.escape(test)} _+$(.*?)(?=^_{{3,}} |^=+ )", self.output, _FLAGS)
        assert found, f"{test} did not fail:\n{self.output}"
        return found[1]

    def errors(self, test: str) -> str:
        """Of these, the lines that pytest marks with E, without the mark."""
        lines = re.findall(r"^E   (?: {4})?(.*)$", self.failure(test), re.MULTILINE)
        return "\n".join(lines)


_FLAGS = re.MULTILINE | re.DOTALL


def run_pytest(
    folder: Path, *args: str, paths: tuple[Path, ...] = (), plugins: bool = False
) -> Run:
    """Run pytest in a folder.

    Args:
        folder: has the test files, and nothing of this project's settings.
        args: for pytest.
        paths: folders to search for packages beside this project's.
        plugins: whether pytest loads the plugins that the environment announces.
    """
    (folder / "pytest.ini").touch()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "RANKFOLD_"))}
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # where vLLM's checkout may be
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, paths), str(ROOT), *others]))
    env["OMP_NUM_THREADS"] = "1"
    env["COLUMNS"] = "120"
    env.pop("CI", None)
    if not plugins:
        # An environment may have rankfold installed; the plugin then comes twice.
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *args],
        cwd=folder, env=env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    return Run(code=done.returncode, output=done.stdout + done.stderr)
