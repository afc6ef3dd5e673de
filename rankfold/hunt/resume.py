"""Which blocks of an exhaustive hunt are done, in a file, so that it can go on later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rankfold.errors import UsageError
from rankfold.files import write_whole
from rankfold.hunt.exhaustive import Scope


class Done(BaseModel):
    """The file's content."""

    model_config = ConfigDict(extra="forbid")

    rankfold_exhaustive: Literal[1] = 1
    scope: str
    vllm: str
    """What was examined: with another version nothing is done."""
    blocks: list[int] = []

    @classmethod
    def read(cls, path: Path, scope: Scope, vllm: str) -> Done:
        """What is done of a scope: nothing if there is no file, or one of another version of vLLM.

        Raises:
            UsageError: the file is broken, or of another scope.
        """
        if not path.exists():
            return cls(scope=scope.fingerprint, vllm=vllm)
        again = "remove it, or give another --state FILE"
        try:
            done = cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, ValidationError):
            raise UsageError(f"{path}: no progress of an exhaustive hunt; {again}") from None
        if done.scope != scope.fingerprint:
            raise UsageError(f"{path}: the progress of another scope; {again}")
        if done.vllm != vllm:
            return cls(scope=scope.fingerprint, vllm=vllm)
        known = range(len(scope.blocks))
        if len({*done.blocks}) != len(done.blocks) or any(b not in known for b in done.blocks):
            raise UsageError(f"{path}: names blocks that the scope does not have; {again}")
        return done

    def write(self, path: Path) -> None:
        """Replace the file, at once.

        Raises:
            UsageError: it cannot be written.
        """
        write_whole(path, json.dumps(self.model_dump(mode="json")))

    def cases(self, scope: Scope) -> int:
        """Cases of the blocks that are done."""
        return sum(len(scope.blocks[i]) for i in self.blocks)
