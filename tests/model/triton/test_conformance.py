"""The stand-ins of sparse attention against vLLM's own Triton kernels, in Triton's interpreter.

Triton is not among what vLLM's model code needs on a CPU. RANKFOLD_TRITON names the folder that it
was installed to (`pip install --no-deps --target FOLDER -r requirements/triton.txt`); without it
the environment's own Triton serves, if there is one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("compare.py")
ROOT = PROGRAM.parents[3]
KERNELS = {"score", "topk", "decode", "prefill attention", "decode attention"}


def has_triton() -> bool:
    folder = os.environ.get("RANKFOLD_TRITON")
    if folder:
        return (Path(folder) / "triton").is_dir()
    return importlib.util.find_spec("triton") is not None


pytestmark = [
    pytest.mark.triton,
    pytest.mark.slow,
    pytest.mark.skipif(
        not has_triton(),
        reason="Triton is not there: pip install --no-deps --target FOLDER -r "
        "requirements/triton.txt, and set RANKFOLD_TRITON=FOLDER",
    ),
]


@cache
def compared(count: int, mutation: str = "") -> dict[str, dict[str, Any]]:
    """What the comparison says of so many random cases of each kernel and dtype."""
    path = [str(ROOT), *filter(None, [os.environ.get("RANKFOLD_TRITON")])]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "0", str(count), mutation],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=280,  # below the limit of a test
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_every_stand_in_agrees_with_its_kernel() -> None:
    """float32 and float16; scores and outputs within the bound that the program states, and the
    same blocks chosen except in near ties."""
    said = compared(2)
    assert said.keys() == KERNELS
    for kernel, of in said.items():
        assert of["cases"] == 4, kernel
        assert of["wrong"] == [], kernel
        assert of["ties"] <= 2, kernel


@pytest.mark.parametrize(
    ("mutation", "kernel"),
    [
        ("wrong-scale", "prefill attention"),
        ("late-causal", "score"),
        ("no-local", "decode"),
    ],
)
def test_a_stand_in_that_is_wrong_is_told(mutation: str, kernel: str) -> None:
    said = compared(2, mutation)
    assert said[kernel]["wrong"] != []
    assert all(of["wrong"] == [] for name, of in said.items() if name != kernel)
