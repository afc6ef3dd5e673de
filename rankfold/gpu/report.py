"""The job's report: as data, and as text for a person. The JSON keys are kept stable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rankfold.gpu.inventory import Inventory
from rankfold.gpu.rows import Row, counts


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One launch."""

    topology: str
    transport: str
    devices: list[str]
    exit_code: int
    seconds: float
    broke: str
    """The whole report on the ranks, if they broke."""
    log: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole job."""

    date: str
    machine: Inventory
    rows: Sequence[Row]
    launches: Sequence[Ran]
    commands: Sequence[tuple[str, str]]
    """Of the full-scale validation: what for, and the command."""
    seconds: float
    thresholds: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no row fails."""
        return not counts(self.rows)["FAIL"]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        plain = asdict(self)
        plain["commands"] = [{"for": what, "command": text} for what, text in self.commands]
        return {"ok": self.ok, "counts": counts(self.rows), **plain}

    def lines(self) -> list[str]:
        """As text."""
        said = [f"rankfold gpu, {self.date}", *_machine(self.machine), ""]
        for ran in self.launches:
            devices = ", ".join(dict.fromkeys(ran.devices)) or "no device"
            said.append(
                f"ran {ran.topology} over {ran.transport} on {devices}: exit code {ran.exit_code}, "
                f"{ran.seconds:g} s"
            )
            said += [f"  {line}" for line in ran.broke.splitlines()]
        said += ["", *table(self.rows), ""]
        total = counts(self.rows)
        said.append(
            f"{total['PASS']} PASS, {total['FAIL']} FAIL, {total['N/A']} N/A  "
            f"({self.seconds:.0f} s)"
        )
        said += ["", "Full scale, with the weights:"]
        for what, command in self.commands:
            said += [f"# {what}", command]
        return said

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write report.json and report.txt; returns their paths."""
        as_json, as_text = folder / "report.json", folder / "report.txt"
        as_json.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        as_text.write_text("\n".join(self.lines()) + "\n", encoding="utf-8")
        return as_json, as_text


def table(rows: Sequence[Row]) -> list[str]:
    """The verdict table as Markdown, which is also text."""
    lines = ["| # | check | verdict | reason |", "|---|---|---|---|"]
    for number, row in enumerate(rows):
        cells = (str(number), row.name, row.verdict, row.reason.replace("\n", " "))
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return lines


def _machine(machine: Inventory) -> list[str]:
    gpus = [
        f"GPU {number}: {gpu.name}, {gpu.memory_gib:g} GiB, compute capability {gpu.capability}"
        for number, gpu in enumerate(machine.gpus)
    ]
    versions = (
        f"Python {machine.python}, torch {machine.torch}, "
        f"CUDA {machine.cuda or 'none'}, driver {machine.driver or 'none'}, "
        f"NCCL {machine.nccl or 'none'}, vLLM {machine.vllm or 'none'}"
    )
    return [
        *(gpus or ["no CUDA GPU"]),
        versions,
        f"vLLM's compiled kernels: {machine.compiled_kernels or 'load'}",
        f"deep_gemm: {machine.deep_gemm or 'loads'}",
    ]
