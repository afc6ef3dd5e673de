"""Writing files whole: a reader, or the next run, never finds half of one."""

from __future__ import annotations

from pathlib import Path

from rankfold.errors import UsageError


def write_whole(path: Path, text: str) -> None:
    """Write a file at once, and the folders above it if they are missing.

    Raises:
        UsageError: it cannot be written.
    """
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
