"""`rankfold run`: any script that uses torch.distributed, on folded ranks, under the sanitizer."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from properties.sanitizer import Allow, AllowError, Finding, Sanitizer
from rankfold.ddp import waiting_in_python
from rankfold.declared import PLUMBING, declarations
from rankfold.errors import UsageError
from rankfold.report import Traffic
from rankfold.variables import Declared, Variables
from rankfold.verdicts import traffic
from sim import RankContext, RankLocal, RankSlot, SimError, Topology, World


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """What to run."""

    script: Path
    topology: Topology
    arguments: Sequence[str] = ()
    """The script's own, `sys.argv[1:]`."""
    allow: Sequence[Allow] = ()
    replicated: Sequence[str] = ()
    """Variables that must be the same on all ranks, as on the command line."""
    quiet: bool = False
    """Whether what the ranks print goes to standard error."""


@dataclass(frozen=True, kw_only=True)
class ScriptReport:
    """What `rankfold run` found. The JSON keys are kept stable."""

    topology: str
    ranks: int
    findings: list[Finding]
    ledger: Traffic
    seconds: float
    looked_at: dict[str, int]
    """How many operations and values were judged, by kind."""
    not_judged: list[str]
    """Declared values that could not be compared, each in a line."""
    broke: SimError | None = None
    """Why the run did not come to its end, if it did not."""

    @property
    def ok(self) -> bool:
        """Whether the run ended and nothing was found that is not allowed."""
        return self.broke is None and all(f.allowed is not None for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `error` is there only if the run broke."""
        found: dict[str, Any] = {
            "ok": self.ok,
            "topology": self.topology,
            "ranks": self.ranks,
            "findings": [finding.to_json() for finding in self.findings],
            "looked_at": self.looked_at,
            "not_judged": self.not_judged,
            "ledger": asdict(self.ledger),
            "seconds": self.seconds,
        }
        return found if self.broke is None else {**found, "error": self.broke.to_json()}


def run_script(options: ScriptOptions) -> ScriptReport:
    """Run the script once on every rank, as torchrun would, and judge its traffic.

    Each rank executes the file as its own `__main__`, with its own `sys.argv` and environment
    (RANK, WORLD_SIZE, ...). Modules that it imports are shared by the ranks.

    Raises:
        UsageError: there is no such file, it is no Python, or it lacks a declared variable.
    """
    started = time.perf_counter()
    torch.set_num_threads(1)
    code = _compiled(options.script)
    path, argv = str(options.script), [str(options.script), *options.arguments]
    try:
        sanitizer = Sanitizer(options.allow, topology=options.topology)
    except AllowError as error:
        raise UsageError(str(error)) from None

    declared = tuple(Declared.parse(text, options.topology) for text in options.replicated)
    variables = Variables(path, declared, options.topology)

    def program(context: RankContext) -> None:
        main = ModuleType("__main__")
        main.__file__ = path
        sys.modules["__main__"] = main
        ended = False
        variables.watch(context.rank)
        try:
            _execute(code, main)
            ended = True
        finally:
            variables.end(context.rank, code, vars(main), sanitizer if ended else None)

    broke = None
    where = contextlib.redirect_stdout(sys.stderr) if options.quiet else contextlib.nullcontext()
    with (
        where,
        _import_from(options.script.parent),
        declarations(sanitizer, options.topology),
        waiting_in_python(),
        World(
            options.topology,
            rank_local=_rank_local(argv),
            plumbing=PLUMBING,
            observers=[sanitizer],
            init=False,
        ) as world,
    ):
        try:
            world.run(program)
        except SimError as error:
            broke = error
    if broke is None:
        variables.check()
    return ScriptReport(
        topology=options.topology.word,
        ranks=options.topology.world_size,
        findings=sanitizer.findings,
        ledger=traffic(world.ledger),
        seconds=round(time.perf_counter() - started, 3),
        looked_at=sanitizer.looked_at,
        not_judged=sanitizer.not_judged,
        broke=broke,
    )


def render_script(report: ScriptReport, console: Console) -> None:
    """Print the findings, the traffic and the verdict."""
    for finding in report.findings:
        mark = Text("FOUND", "bold red") if finding.allowed is None else Text("allowed", "yellow")
        console.print(mark, Text(f"{finding.rule}: {finding.what}"))
        console.print(Text(f"       where: {finding.where}"))
        console.print(Text(f"       why:   {finding.why}"))
        if finding.allowed is not None:
            console.print(Text(f"       allowed: {finding.allowed}"))
    for op, of_op in report.ledger.by_op.items():
        for group, part in of_op.groups.items():
            console.print(Text(f"ledger {op} on {group}: {part['count']}, {part['bytes']:,} bytes"))
    looked = ", ".join(f"{kind} {count:,}" for kind, count in report.looked_at.items() if count)
    console.print(Text(f"judged {looked or 'nothing'}"))
    for line in report.not_judged:
        console.print(Text(f"not judged: {line}"))
    wrong = sum(finding.allowed is None for finding in report.findings)
    said = f"{wrong} finding{'' if wrong == 1 else 's'}" if wrong else "no findings"
    if report.broke is not None:
        said = f"the run broke; {said} until then"
    count = report.ledger.collectives
    line = f"{report.topology}: {report.ranks} folded ranks, {count} operations: {said}"
    style = "bold green" if report.ok else "bold red"
    console.print(Text(f"{line}  ({report.seconds:.1f} s)", style))


def _execute(code: CodeType, main: ModuleType) -> None:
    """Run the script as its rank's main module; it may exit, with success."""
    try:
        exec(code, vars(main))
    except SystemExit as end:
        if end.code not in (None, 0):
            ended = RuntimeError(f"the script ended with sys.exit({end.code!r})")
            raise ended.with_traceback(end.__traceback__) from end


def _compiled(script: Path) -> CodeType:
    try:
        # As Python reads it: with the encoding that the file declares.
        with io.open_code(str(script)) as file:
            return compile(file.read(), str(script), "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"{script}: {error.strerror}; give a Python file") from None
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{script}{line}: no Python: {text}") from None


@contextlib.contextmanager
def _import_from(folder: Path) -> Iterator[None]:
    """The script's folder comes first in the search for modules, as when Python runs it."""
    before = list(sys.path)
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path[:] = before


def _rank_local(argv: list[str]) -> list[RankLocal | RankSlot]:
    def set_main(module: ModuleType) -> None:
        sys.modules["__main__"] = module

    return [
        RankLocal("sys", ("argv",), "each rank parses its own", fresh=lambda: list(argv)),
        RankSlot(
            "__main__", lambda: sys.modules["__main__"], set_main, "each rank runs the script"
        ),
    ]
