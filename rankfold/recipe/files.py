"""Finds the files that recipes and entries name: recipes by CONFIG_FILE, and set-up scripts.

Both are looked for in the folders above the file that names them, up to the repository's root: the
launchers of the field put those folders' `recipes` and `configs` in place. What lies in another
repository cannot be found, and is then not judged.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

OVERLAY = PurePosixPath("benchmarks/multi_node/srt-slurm-recipes")
"""Where InferenceX keeps its own recipes, and their scripts in `configs`."""
MAX_LEVELS = 8
MAX_LISTED = 5000
"""Files that are listed to find one that was renamed."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What became of looking for a file."""

    path: Path | None = None
    judged: bool = True
    """False if there is no folder here in which it would have to be."""
    nearest: str = ""
    """The file that it may have been renamed to, as it would have to be written."""


def find_recipe(named_in: str, config_file: str, root: Path | None = None) -> Found:
    """Look for the recipe of a CONFIG_FILE.

    Args:
        named_in: the file that names it.
        root: the folder that is `recipes`, where it is known.
    """
    written = PurePosixPath(config_file)
    if written.is_absolute() or ".." in written.parts or "$" in config_file or "\0" in config_file:
        return Found(judged=False)
    below = written.relative_to("recipes") if written.parts[:1] == ("recipes",) else written
    roots = [root] if root else list(_roots(named_in))
    for folder in roots:
        if (folder / below).is_file():
            return Found(path=folder / below)
    for folder in _above(named_in):
        if root is None and (folder / written).is_file():
            return Found(path=folder / written)
    for folder in roots:
        first = folder / below.parts[0]
        if root or (len(below.parts) > 1 and first.is_dir()):
            prefix = config_file[: len(config_file) - len(str(below))]
            return Found(nearest=_nearest(folder, below, prefix))
    return Found(judged=False)


def _roots(named_in: str) -> Iterator[Path]:
    """The folders that may be `recipes`."""
    for folder in _above(named_in):
        for candidate in (folder / "recipes", folder / OVERLAY):
            if candidate.is_dir():
                yield candidate


def _above(named_in: str) -> Iterator[Path]:
    """The folders above a file, to the root of its repository."""
    folder = Path(named_in).resolve().parent
    for _ in range(MAX_LEVELS):
        yield folder
        if (folder / ".git").exists() or folder.parent == folder:
            return
        folder = folder.parent


def _nearest(root: Path, below: PurePosixPath, prefix: str) -> str:
    """The recipe whose path is most like the one that is not there."""
    folder = root / below.parent
    start = folder if folder.is_dir() else root / below.parts[0]
    names = []
    for path in start.rglob("*.y*ml") if start.is_dir() else ():
        names.append(path.relative_to(root).as_posix())
        if len(names) >= MAX_LISTED:
            break
    close = difflib.get_close_matches(str(below), sorted(names), n=1, cutoff=0.8)
    return prefix + close[0] if close else ""


def find_script(named_in: str, script: str) -> Found:
    """Look for the set-up script of a recipe: in `configs` above it, or beside it."""
    written = PurePosixPath(script)
    if written.is_absolute() or ".." in written.parts or "$" in script or "\0" in script:
        return Found(judged=False)
    configs = []
    for folder in _above(named_in):
        configs += [folder / "configs", folder / OVERLAY / "configs"]
    configs = [folder for folder in configs if folder.is_dir()]
    for folder in (*configs, Path(named_in).resolve().parent):
        if (folder / written).is_file():
            return Found(path=folder / written)
    return Found(judged=bool(configs))
