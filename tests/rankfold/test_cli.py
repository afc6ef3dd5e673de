"""The command line: exit codes, one-line errors, stable JSON."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from rankfold import check
from rankfold.cli import main
from sim import Deadlock, RankReport

KEYS = {
    "ok": bool,
    "topology": str,
    "ranks": int,
    "tokens": int,
    "seed": int,
    "transport": str,
    "subject": dict,
    "checks": list,
    "taps": list,
    "against": object,
    "ledger": dict,
    "seconds": float,
}


def test_json_has_the_stable_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tp2pp2", "--against", "tp2", "--tokens", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for key, kind in KEYS.items():
        assert isinstance(found[key], kind), key
    assert set(found["subject"]) == {"vllm", "model", "sequence_parallel", "moe_backend"}
    assert {"name", "ok", "what", "where", "why"} <= set(found["checks"][0])
    assert {"name", "ok", "expected", "max_abs_err", "bound"} <= set(found["taps"][0])
    assert found["against"]["topology"] == "tp2"
    assert found["against"]["max_abs_delta"] == 0
    assert {"collectives", "bytes", "by_op"} <= set(found["ledger"])
    assert found["transport"] == "folded"


def test_the_table_names_every_tap_and_ends_with_the_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "tp2", "--tokens", "2"]) == 0
    out = capsys.readouterr().out
    for text in ("layers.0.attn", "Partial(tp)", "all_reduce", "holds"):
        assert text in out
    assert "tp2 holds" in out.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "tp3"], "query heads do not divide by 3"),
        (["check", "banana"], "no topology"),
        (["check", "tp0"], "1 or more"),
        (["check", "pp8"], "layers do not make 8 stages"),
        (["check", "dp64"], "do not divide by its 64 ranks"),
        (["check", "tp2", "--tokens", "-1"], "tokens"),
        (["check", "tp2", "--tokens", "many"], "use a number"),
        (["generate", "dp2", "--prompt", "1,2"], "no data parallelism"),
        (["check", "tp2", "--sequences", "9"], "sequences"),
        (["check", "tp2", "--dtype", "int3"], "float32"),
        (["check", "tp2", "--layers", "dxm"], "dense FFN"),
        (["check", "tp2", "--against", "tp3"], "do not divide by 3"),
        (["check"], "required"),
        (["chekc", "tp2"], "invalid choice"),
        ([], "required"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1, err


def test_bad_usage_does_not_wait_for_vllm() -> None:
    script = (
        "import sys; from rankfold.cli import main; code = main(['check', 'tp3']); "
        "assert 'vllm' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr


def test_a_broken_run_is_exit_code_3_with_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = RankReport(rank=1, state="waits in", operation="all_reduce(sum) float32[2]")

    def broken(options: check.Options, progress: Callable[[str], None]) -> None:
        raise Deadlock("deadlock: rank 1 waits", (report,))

    monkeypatch.setattr(check, "run_check", broken)
    assert main(["check", "tp2", "--json"]) == 3
    out, err = capsys.readouterr()
    assert "rank 1 waits in all_reduce" in err
    assert json.loads(out)["error"]["ranks"][0]["rank"] == 1


def test_ctrl_c_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: check.Options, progress: Callable[[str], None]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run_check", interrupted)
    assert main(["check", "tp2"]) == 130
    assert capsys.readouterr().err.strip().splitlines() == ["rankfold: interrupted"]
