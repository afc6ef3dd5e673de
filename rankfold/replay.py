"""Replay files: a failing example as a small readable file, and running it again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from properties import Verdict
from properties.faults import UnknownFault, find
from rankfold.check import check_step
from rankfold.data_parallel import check_dp_step
from rankfold.errors import UsageError
from rankfold.example import Example
from rankfold.files import write_whole
from rankfold.relate import relate
from rankfold.report import Report
from rankfold.run import Progress
from rankfold.serving.check import check_plan

VERSION = 1
"""Raised when a file of this version could no longer be read as what it meant."""
LARGEST = 1 << 20
"""Bytes of a file that is read at all; a real one has a few hundred."""


class Expected(BaseModel):
    """The headline that the example had when the file was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    kind: str
    at: str
    what: str
    where: str
    why: str

    @classmethod
    def of(cls, verdict: Verdict) -> Expected:
        """From a verdict."""
        return cls(
            check=verdict.name,
            kind=verdict.kind,
            at=verdict.at,
            what=verdict.what,
            where=verdict.where,
            why=verdict.why,
        )

    def is_met_by(self, verdict: Verdict) -> bool:
        """Whether a verdict says the same: check, kind and place."""
        return (self.check, self.kind, self.at) == (verdict.name, verdict.kind, verdict.at)


class Replay(BaseModel):
    """A replay file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rankfold_replay: Literal[1] = 1
    vllm: str
    """The version of vLLM that the example failed with."""
    fault: str | None = None
    """The fault that was switched on, by name."""
    example: Example
    verdict: Expected

    def write(self, directory: Path) -> Path:
        """Write the file; its name says what it is, and equal examples have one file.

        Raises:
            UsageError: it cannot be written there.
        """
        kind = "-".join(filter(None, (self.fault, self.example.topology, self.verdict.kind)))
        name = "".join(c if c.isalnum() or c in "-." else "-" for c in kind)
        path = directory / f"{name}-{_fingerprint(self.example)}.json"
        write_whole(path, json.dumps(self.model_dump(mode="json"), indent=1) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> Replay:
        """Read and check a file.

        Raises:
            UsageError: it is missing, broken, of a newer version, or describes no step; one line.
        """
        data = _load(path)
        version = data.get("rankfold_replay")
        if type(version) is not int or version < 1:
            raise UsageError(f"{path}: no replay file: it has no `rankfold_replay` version")
        if version > VERSION:
            raise UsageError(
                f"{path}: version {version} is newer than this rankfold, which reads {VERSION}"
            )
        try:
            replay = cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise UsageError(f"{path}: {place}: {first['msg']}") from None
        try:
            options = replay.example.options()
            if replay.example.relation and not replay.example.dp_seqs:
                relate(replay.example.relation, replay.example.batch(), options.tiny.vocab_size)
            if replay.fault is not None:
                find(replay.fault)
        except (ValueError, UnknownFault) as error:
            raise UsageError(f"{path}: {error}") from None
        return replay


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a replay has shown."""

    file: str
    reproduced: bool
    """Whether the headline is the same: check, kind and place."""
    report: Report

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        shown = self.report.to_json()
        return {"file": self.file, "reproduced": self.reproduced, **shown}


def run_replay(path: Path, progress: Progress, *, transport: str = "folded") -> Replayed:
    """Run a replay file's example again, with all checks and the reference of its own batch.

    transport: what the ranks are; "gloo" has a schedule of its own.

    Raises:
        UsageError: the file is no good.
        SimError: the model cannot be built.
    """
    replay = Replay.read(path)
    example = replay.example
    options = replace(example.options(), transport=transport)
    if example.in_steps:
        shown = check_plan(
            options,
            example.plan(),
            example.sequences(),
            progress,
            schedule=example.run_schedule(),
            relation=bool(example.relation),
            fault=replay.fault,
        )
    elif example.dp_seqs:
        shown = check_dp_step(
            options,
            progress,
            batches=example.batches(),
            schedule=example.run_schedule(),
            fault=replay.fault,
        )
    else:
        shown = check_step(
            options,
            example.batch(),
            progress,
            schedule=example.run_schedule(),
            relations=[example.relation] if example.relation else [],
            fault=replay.fault,
        )
    first = shown.first
    return Replayed(
        file=str(path),
        reproduced=first is not None and replay.verdict.is_met_by(first),
        report=shown,
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST:
            raise UsageError(f"{path}: larger than {LARGEST} bytes: no replay file")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: broken JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: no replay file: it is not a JSON object")
    return data


def _fingerprint(example: Example) -> str:
    return hashlib.sha256(example.model_dump_json().encode()).hexdigest()[:8]
