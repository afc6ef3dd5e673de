"""`rankfold run`: scripts with plain torch.distributed, from the command line to the findings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from rankfold.cli import main

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
WRONG = SCRIPTS / "double_all_reduce.py"
HEADER = "import sys\nimport torch\nimport torch.distributed as dist\n"
INIT = HEADER + 'dist.init_process_group("gloo")\n'


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


def line_of(path: Path, text: str) -> int:
    """The number of the only line that holds the text."""
    (number,) = (n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line)
    return number


@pytest.mark.parametrize("world", ["tp2", "tp4", "tp2pp2"])
def test_the_double_all_reduce_is_found_with_both_lines(
    world: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(WRONG), "--world", world]) == 1
    out = capsys.readouterr().out
    assert "FOUND reduced again" in out
    assert f"double_all_reduce.py:{line_of(WRONG, 'dist.all_reduce(y)  # wrong')}" in out
    assert f"double_all_reduce.py:{line_of(WRONG, '        dist.all_reduce(y)')}" in out
    assert "ledger all_reduce on default_pg: 2" in out
    assert "1 finding " in out.strip().splitlines()[-1]


@pytest.mark.parametrize("world", ["tp1", "tp2", "tp4"])
def test_the_right_script_is_clean(world: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(SCRIPTS / "right.py"), "--world", world]) == 0
    assert "no findings" in capsys.readouterr().out


def test_json_has_the_stable_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(WRONG), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "ok", "topology", "ranks", "findings", "looked_at", "not_judged", "ledger", "seconds",
    }  # fmt: skip
    assert found["ok"] is False
    assert (found["topology"], found["ranks"]) == ("tp4", 4)
    (finding,) = found["findings"]
    assert {"rule", "what", "where", "why", "allowed"} <= set(finding)
    assert finding["allowed"] is None
    assert found["ledger"]["by_op"]["all_reduce"]["count"] == 2
    assert found["ledger"]["collectives"] == 2


def test_an_allowed_site_is_shown_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    site = f"{WRONG.name}:{line_of(WRONG, 'dist.all_reduce(y)  # wrong')}"
    assert main(["run", str(WRONG), "--allow", "reduced again", site, "a drill"]) == 0
    out = capsys.readouterr().out
    assert "allowed reduced again" in out
    assert "allowed: a drill" in out
    assert "no findings" in out


def test_the_script_sees_what_torchrun_would_give_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own __main__, arguments, environment, folder and standard output, on every rank."""
    (tmp_path / "helper_of_the_script.py").write_text("VALUE = 5\n")
    text = INIT + (
        "import os\nimport helper_of_the_script as helper\n"
        "mine = dist.get_rank()\n"
        "dist.barrier()\n"
        "main = sys.modules['__main__']\n"
        "assert __name__ == '__main__' and main.mine == mine == int(os.environ['RANK'])\n"
        "sys.argv.append(str(mine))\n"
        "dist.barrier()\n"
        "print(helper.VALUE, sys.argv[1:], dist.get_world_size())\n"
        "dist.destroy_process_group()\n"
    )
    main_before, path_before, argv_before = sys.modules["__main__"], [*sys.path], [*sys.argv]
    path = script(tmp_path, text)
    assert main(["run", path, "--world", "tp2", "--", "--lr", "--json"]) == 0
    printed = capsys.readouterr().out
    for rank in range(2):
        assert f"5 ['--lr', '--json', '{rank}'] 2" in printed
    assert sys.modules["__main__"] is main_before
    assert sys.path == path_before and sys.argv == argv_before
    assert not dist.is_initialized()


def test_json_is_all_there_is_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, INIT + "print('hello from', dist.get_rank())\n")
    assert main(["run", path, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"]
    assert "hello from 3" in err


@pytest.mark.parametrize(
    "init",
    [
        'dist.init_process_group("nccl")',
        "dist.init_process_group()",
        'dist.init_process_group("gloo", init_method="env://")',
        'dist.init_process_group("gloo", init_method="tcp://localhost:1", rank=rank, world_size=4)',
        'dist.init_process_group("gloo"); dist.destroy_process_group(); '
        'dist.init_process_group("gloo")',
        'torch.distributed.device_mesh.init_device_mesh("cpu", (4,))',
    ],
)
def test_a_script_may_initialise_in_its_own_way(tmp_path: Path, init: str) -> None:
    text = HEADER + "import os\nrank = int(os.environ['RANK'])\n" + init
    text += "\nx = torch.ones(2) * rank\ndist.all_reduce(x)\nassert x.tolist() == [6.0, 6.0]\n"
    assert main(["run", script(tmp_path, text)]) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (INIT + "if dist.get_rank(): dist.barrier()\n", "deadlock"),
        (INIT + "dist.all_reduce(torch.ones(2 + dist.get_rank()))\n", "mismatch"),
        (INIT + "raise RuntimeError('my own fault')\n", "my own fault at"),
        (INIT + "sys.exit('no data')\n", "sys.exit('no data')"),
        (HEADER + "dist.all_reduce(torch.ones(2))\n", "init_process_group"),
    ],
)
def test_a_run_that_breaks_is_exit_code_3_with_the_report(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", script(tmp_path, text), "--json"]) == 3
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["ok"] is False and len(found["error"]["ranks"]) == 4
    assert says in err and "program.py:" in err
    assert not dist.is_initialized()


def test_findings_before_a_break_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = INIT + "x = torch.randn(8, generator=torch.Generator().manual_seed(0))\n"
    text += "dist.all_reduce(x)\nif dist.get_rank(): dist.barrier()\n"
    assert main(["run", script(tmp_path, text)]) == 3
    assert "FOUND equal addends" in capsys.readouterr().out


def test_a_result_dropped_by_the_script_itself_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-LM issue 5337, at the top level of a script and in a function with a group."""
    text = INIT + (
        "def reduce(input_, group):\n"
        "    dist.all_reduce(input_.contiguous(), group=group)\n"
        "    return input_\n"
        "x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank())).t()\n"
        "dist.all_reduce(x.contiguous())\n"
        "reduce(x, dist.group.WORLD)\n"
    )
    assert main(["run", script(tmp_path, text), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["rule"] for finding in findings] == ["dropped result"] * 2
    assert "`x`" in findings[0]["what"] and "program.py:9" in findings[0]["where"]
    assert "`input_`" in findings[1]["what"] and "program.py:6" in findings[1]["where"]
    assert [finding["times"] for finding in findings] == [1, 1]


EXAMPLES = [
    ("double_all_reduce", "tp4", "reduced again"),
    ("missing_reduce", "tp4", "not replicated"),
    ("wrong_group_gather", "dp2tp2", "wrong group"),
    ("dropped_reduce", "tp4", "dropped result"),
    ("sliced_send", "tp2pp2", "sliced shards"),
]


@pytest.mark.parametrize(("name", "world", "rule"), EXAMPLES)
def test_an_example_is_found_and_its_right_twin_is_not(
    name: str, world: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = SCRIPTS / f"{name}.py"
    assert f"examples/scripts/{name}.py --world {world}" in wrong.read_text()
    assert main(["run", str(wrong), "--world", world]) == 1
    out = capsys.readouterr().out
    headlines = [line for line in out.splitlines() if line.startswith("FOUND")]
    assert headlines and all(line.startswith(f"FOUND {rule}:") for line in headlines)
    assert f"{name}.py:" in out
    right = SCRIPTS / ("right.py" if rule == "reduced again" else f"{name}_right.py")
    assert main(["run", str(right), "--world", world]) == 0
    assert "no findings" in capsys.readouterr().out


def test_every_example_is_tested() -> None:
    wrong = {name for name, _, _ in EXAMPLES}
    assert {path.stem.removesuffix("_right") for path in SCRIPTS.glob("*.py")} == {*wrong, "right"}


def test_a_rank_may_send_and_end_before_its_peer_begins(tmp_path: Path) -> None:
    text = INIT + (
        "x = torch.ones(2)\n"
        "if dist.get_rank() == 0: dist.send(x, 3)\n"
        "if dist.get_rank() == 3: dist.recv(x, 0)\n"
        "dist.destroy_process_group()\n"
    )
    assert main(["run", script(tmp_path, text)]) == 0


def test_a_script_may_exit_with_success(tmp_path: Path) -> None:
    assert main(["run", script(tmp_path, INIT + "sys.exit(0)\n")]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no_such_file.py"], "no_such_file.py: No such file"),
        ([str(SCRIPTS)], "directory"),
        ([str(WRONG), "--world", "banana"], "no topology"),
        ([str(WRONG), "--allow", "no rule", "a.py", "why"], "use reduced again"),
        ([str(WRONG), "--allow", "equal addends", "a.py", ""], "a reason"),
        ([str(WRONG), "--lr", "3"], "unrecognized arguments"),
        ([], "required: script"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["run", *arguments])
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1, err


def test_a_file_that_is_no_python_is_bad_usage_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", script(tmp_path, "x = 1\nthis is no Python\n")]) == 2
    assert "program.py:2: no Python" in capsys.readouterr().err


def test_vllm_is_not_imported() -> None:
    code = (
        "import sys; from rankfold.cli import main; code = main(sys.argv[1:]); "
        "assert 'vllm' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "run", str(SCRIPTS / "right.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_readme_shows_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the time."""
    shown = (ROOT / "README.md").read_text().split("$ rankfold run ")[1].split("```")[0]
    command, *lines = shown.strip().splitlines()
    monkeypatch.chdir(ROOT)
    assert main(["run", *command.split()]) == 1
    printed = capsys.readouterr().out.strip().splitlines()
    assert [line.split("  (")[0] for line in printed] == [line.split("  (")[0] for line in lines]
