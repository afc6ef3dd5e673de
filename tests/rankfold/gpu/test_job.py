"""The job as people call it: where nothing can run, over gloo in place of NCCL, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankfold.cli import main
from rankfold.gpu import inventory
from rankfold.gpu.fullscale import commands
from rankfold.gpu.inventory import Gpu, Inventory
from rankfold.gpu.report import Ran, Report
from rankfold.gpu.rows import Row

DATA = Path(__file__).parent / "data"
NO_GPU = Inventory(
    python="3.12.1",
    torch="2.11.0",
    cuda=None,
    driver=None,
    nccl=None,
    gpus=(),
    vllm="0.33.0",
    compiled_kernels="this vLLM is without compiled files",
    deep_gemm="this vLLM is without compiled files",
)
H200 = Gpu(name="NVIDIA H200", memory_gib=139.8, capability="9.0")
B300 = Gpu(name="NVIDIA B300", memory_gib=268.0, capability="10.3")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "look", lambda: NO_GPU)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report."""
    code = main(["gpu", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_without_a_gpu_every_row_says_why_it_was_not_run(
    no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(capsys, "--out", str(tmp_path))
    assert (code, found["ok"]) == (0, True)
    assert found["counts"] == {"PASS": 0, "FAIL": 0, "N/A": 13}
    assert all(row["verdict"] == "N/A" and row["reason"] for row in found["rows"])
    by_name = {row["name"]: row["reason"] for row in found["rows"]}
    assert by_name["tep2pp2 over NCCL"] == "needs 4 CUDA GPUs, this machine has 0"
    assert by_name["real MegaMoE (SM100)"] == "no CUDA GPU"
    assert found["launches"] == []
    assert json.loads((tmp_path / "report.json").read_text()) == found
    assert "| tp2 over NCCL | N/A | needs 2 CUDA GPUs" in (tmp_path / "report.txt").read_text()


def test_full_scale_files_are_judged(
    no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = json.loads((DATA / "bench_serve.json").read_text())
    for name, speed in (("on1", 2007.0), ("on2", 1994.0), ("off1", 2013.0), ("off2", 2005.0)):
        (tmp_path / name).write_text(json.dumps({**bench, "output_throughput": speed}))
    arms = [f"{arm}={tmp_path / (arm + run)}" for run in "12" for arm in ("on", "off")]
    files = [f"pp2={DATA / 'gsm8k_eval.json'}", *arms]
    files += [f"{arm}={DATA / 'completions.json'}" for arm in ("pp1", "pp2")]
    code, found = run(capsys, "--out", str(tmp_path), "--read", *files)
    assert code == 0
    passes = {row["name"]: row["reason"] for row in found["rows"] if row["verdict"] == "PASS"}
    assert set(passes) == {
        "GSM8K, pp2",
        "prompt logprobs, pp2 against pp1",
        "throughput, on against off",
    }
    # The reader takes lm-eval's strict filter, which is below the threshold here.
    code, found = run(
        capsys, "--out", str(tmp_path), "--read", str(DATA / "lm_eval.json"), "--topology", "tp2"
    )
    assert (code, found["counts"]["FAIL"]) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--read", "nothing.json"), "nothing.json: No such file"),
        (("--topology", "xp2"), "'xp2' is no topology"),
        (("--topology", "tp3"), "tp3"),
        (("--threshold", "gsm8k=90"), "a value from 0 to 1"),
        (("--attention", "none"), "--attention 'none'"),
    ],
)
def test_bad_input_is_one_line(
    no_gpu: None,
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["gpu", "--out", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr()
    [line] = [line for line in said.err.splitlines() if line.startswith("rankfold gpu: ")]
    assert says in line
    assert said.out == ""


def test_mega_moe_needs_sm100_and_its_module() -> None:
    has = {"compiled_kernels": "", "deep_gemm": ""}
    at = {name: getattr(NO_GPU, name) for name in ("python", "torch", "cuda", "driver", "nccl")}
    of = [Inventory(**at, **has, vllm="0.33.0", gpus=(gpu,) * 2) for gpu in (H200, B300)]
    assert of[0].real_mega_moe == "they need compute capability 10.x, this machine has 9.0"
    assert of[1].real_mega_moe == ""
    without = Inventory(**at, compiled_kernels="", deep_gemm="no file", vllm="1", gpus=(B300,))
    assert without.real_mega_moe == "no file"


@pytest.mark.slow
def test_looking_at_this_machine() -> None:
    found = inventory.look()
    assert found.vllm is not None
    # Whether they load depends on the machine; either way there is an answer.
    assert "\n" not in found.compiled_kernels + found.deep_gemm


def test_the_report_as_text() -> None:
    ran = Ran(
        topology="tp2",
        transport="nccl",
        devices=["NVIDIA H200", "NVIDIA H200"],
        exit_code=1,
        seconds=21.0,
        broke="rank 1 raised ValueError: x\n  rank 0 waits in all_reduce",
        log="tp2.log",
    )
    report = Report(
        date="2026-01-01 00:00 UTC",
        machine=NO_GPU,
        rows=[Row(name="a | b", verdict="FAIL", reason="two\nlines")],
        launches=[ran],
        commands=commands(),
        seconds=30.0,
    )
    text = "\n".join(report.lines())
    assert "ran tp2 over nccl on NVIDIA H200: exit code 1, 21 s" in text
    assert "    rank 0 waits in all_reduce" in text
    assert "| 0 | a / b | FAIL | two lines |" in text
    assert "0 PASS, 1 FAIL, 0 N/A" in text
    assert not report.ok


def test_the_commands_are_those_of_the_validation() -> None:
    text = "\n".join(command for _, command in commands())
    for part in (
        "--enable-expert-parallel --moe-backend deep_gemm_mega_moe --tensor-parallel-size 2 "
        "--pipeline-parallel-size 2",
        "gsm8k_eval.py --max-concurrency 64 --use-chat-completions --max-tokens 1024",
        "vllm bench serve --model MiniMaxAI/MiniMax-M3.1-Flash --dataset-name random "
        "--random-input-len 512 --random-output-len 512 --num-prompts 512 --max-concurrency 64 "
        "--ignore-eos --seed 1",
        '"num_speculative_tokens": 7',
        "max_tokens: 1, temperature: 0, prompt_logprobs: 0",
    ):
        assert part in text
