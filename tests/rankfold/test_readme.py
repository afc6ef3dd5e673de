"""The README's code runs, and prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

from rankfold.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_python_example_prints_what_its_comment_says() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [block for block in blocks if "with World(" in block]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    assert "tensor([6., 6.])" in code
    assert out.getvalue().startswith("tensor([6., 6.])\n")
    assert '"op": "all_reduce"' in out.getvalue()


def test_the_shown_check_is_what_is_printed() -> None:
    """Errors and times differ by machine; names, placements, traffic and verdicts do not."""
    shown = README.split("$ rankfold check tep2pp2\n")[1].split("```")[0]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["check", "tep2pp2"]) == 0
    printed = {_stable(line) for line in out.getvalue().splitlines()}
    for line in shown.splitlines():
        if line.strip("."):
            assert _stable(line) in printed, line


def _stable(line: str) -> str:
    """The line without floating-point figures, times and runs of blanks."""
    return re.sub(r"\s+", " ", re.sub(r"\d\.\de[+-]\d+|\(\d+\.\d s\)", "#", line)).strip()
