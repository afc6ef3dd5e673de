"""`rankfold run`: values that a script or the command line declares replicated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rankfold.cli import main

ROOT = Path(__file__).parents[2]
HEADER = "import sys\nimport torch\nimport torch.distributed as dist\n"
INIT = HEADER + 'dist.init_process_group("gloo")\n'


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


LINEAR = INIT + (
    "def seeded(seed, *shape):\n"
    "    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))\n"
    "def step(reduce):\n"
    "    out = seeded(0, 4, 4) @ seeded(dist.get_rank(), 4, 4)\n"
    "    if reduce:\n"
    "        dist.all_reduce(out)\n"
    "    return out\n"
    "def main(reduce):\n"
    "    out = step(reduce)\n"
    "    dist.destroy_process_group()\n"
)


@pytest.mark.parametrize("name", ["out", "main.out", "step.out", "out@tp", "out@0,2"])
@pytest.mark.parametrize("reduce", [True, False])
def test_a_local_variable_can_be_declared(
    tmp_path: Path, name: str, reduce: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, LINEAR + f"main({reduce})\n")
    assert main(["run", path, "--world", "tp4", "--replicated", name]) == (0 if reduce else 1)
    out = capsys.readouterr().out
    assert "declared values 1" in out
    assert ("FOUND not replicated: `out`" in out) is not reduce
    line = 8 if name == "step.out" else 13
    assert (f"program.py:{line}" in out) is not reduce


def test_the_outermost_variable_counts_and_the_inner_ones_may_differ(tmp_path: Path) -> None:
    """A layer's own `out` is a term; the script's is the sum."""
    text = INIT + (
        "def layer():\n"
        "    out = torch.randn(4, 4, generator=torch.Generator().manual_seed(dist.get_rank()))\n"
        "    return out\n"
    )
    body = "out = layer()\ndist.all_reduce(out)\n"
    at_top = script(tmp_path, text + body)
    assert main(["run", at_top, "--replicated", "out"]) == 0
    assert main(["run", at_top, "--replicated", "layer.out"]) == 1
    in_main = text + "def main():\n    " + body.replace("\n", "\n    ") + "\nmain()\n"
    assert main(["run", script(tmp_path, in_main), "--replicated", "out"]) == 0


@pytest.mark.parametrize(
    ("body", "name", "says"),
    [
        ("", "out", "no variable 'out'"),
        ("out = 'text'\n", "out", "no tensor, but a str"),
        ("if dist.get_rank(): out = torch.ones(2)\n", "out", "ranks [0] have no such variable"),
        ("def a():\n    out = 1.0\ndef b():\n    out = 1.0\na()\nb()\n", "out", "a and of b"),
        ("", "out@banana", "no axis"),
        ("", "out@0,9", "of 0 to 3"),
        ("", "out@pp", "one rank along pp"),
        ("", "2out", "use NAME"),
    ],
)
def test_a_declaration_that_means_nothing_is_bad_usage(
    tmp_path: Path, body: str, name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", script(tmp_path, INIT + body), "--replicated", name]) == 2
    err = capsys.readouterr().err.strip()
    assert says in err and len(err.splitlines()) == 1, err


def test_a_stage_may_lack_a_variable_declared_along_an_axis(tmp_path: Path) -> None:
    text = INIT + "if dist.get_rank() > 1:\n    out = torch.ones(2)\n"
    path = script(tmp_path, text)
    assert main(["run", path, "--world", "tp2pp2", "--replicated", "out@tp"]) == 0
    assert main(["run", path, "--world", "tp2pp2", "--replicated", "out@2,3"]) == 0


DTENSOR = HEADER + (
    "from torch.distributed.device_mesh import init_device_mesh\n"
    "from torch.distributed.tensor import DTensor, Partial, Replicate, Shard\n"
    "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
    "def seeded(seed):\n"
    "    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))\n"
    "rank = dist.get_rank()\n"
)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("DTensor.from_local(seeded(rank), mesh, [Replicate(), Replicate()])", 4),
        ("DTensor.from_local(seeded(rank), mesh, [Shard(0), Replicate()], run_check=False)", 2),
        ("DTensor.from_local(seeded(rank), mesh['tp'], [Replicate()])", 2),
        ("DTensor.from_local(seeded(rank), mesh, [Shard(0), Partial()])", 0),
        ("DTensor.from_local(seeded(rank // 2), mesh, [Shard(0), Replicate()])", 0),
        ("DTensor.from_local(seeded(rank), mesh['tp'], [Replicate()], run_check=True)", 0),
        ("DTensor.from_local(seeded(rank), mesh['tp'], [Partial()]).full_tensor()", 0),
    ],
)
def test_a_dtensor_from_local_values_is_a_declaration(
    tmp_path: Path, line: str, found: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, DTENSOR + line + "\n")
    assert main(["run", path, "--world", "dp2tp2", "--json"]) == (1 if found else 0)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["rule"] for finding in findings] == ["not replicated"] * found
    assert all("program.py:10" in finding["where"] for finding in findings)


def test_a_declaration_does_nothing_outside_of_a_folded_run() -> None:
    code = (
        "import sys; from rankfold import replicated; x = object(); assert replicated(x) is x; "
        "assert not {'torch', 'sim', 'properties'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_compared_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = INIT + "from rankfold import replicated\nif dist.get_rank(): replicated(1.0)\n"
    assert main(["run", script(tmp_path, text)]) == 0
    assert "not judged: `out` at" in capsys.readouterr().out
    text = INIT + "from rankfold import replicated\nreplicated('text')\n"
    assert main(["run", script(tmp_path, text)]) == 3
    assert "str is no tensor" in capsys.readouterr().err
