"""`rankfold check` in steps and `rankfold generate`: exit codes, one-line errors, stable JSON."""

from __future__ import annotations

import json

import pytest

from rankfold.cli import main

REQUEST = {"prompt", "tokens", "prompt_logprobs", "logprobs"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "tp2", "--prompt", ""], "token ids between commas"),
        (["generate", "tp2", "--prompt", "1,,2"], "token ids between commas"),
        (["generate", "tp2", "--prompt", "1,2;"], "token ids between commas"),
        (["generate", "tp2", "--prompt", "1,two"], "token ids between commas"),
        (["generate", "tp2", "--prompt", "1,256"], "token id 256: use 0 to 255"),
        (["generate", "tp2", "--prompt", "-1,2"], "token id -1"),
        (["generate", "tp2", "--prompt", "1", "--tokens", "0"], "--tokens 0"),
        (["generate", "tp2", "--prompt", "1", "--tokens", "4097"], "4096 positions"),
        (["generate", "tp2", "--prompt", ";".join("1" * 9)], "9 prompts: use 1 to 8"),
        (["generate", "tp2", "--prompt", "1", "--temperature", "2"], "--seed-sampling"),
        (["generate", "tp2", "--prompt", "1", "--seed-sampling", "-1"], "--seed-sampling -1"),
        (["generate", "tp2", "--prompt", "1", "--chunk", "-1"], "--chunk -1"),
        (["generate", "tp3", "--prompt", "1"], "query heads do not divide by 3"),
        (["generate", "tp2", "--prompt", "1", "--against", "tp3"], "do not divide by 3"),
        (["generate", "tp2"], "--prompt"),
        (["check", "tp2", "--attention", "flash"], "use dense, sparse, model"),
        (["check", "tp2", "--requests", "9"], "--requests 9: use 1 to 8"),
        (["check", "tp2", "--requests", "-1"], "--requests -1"),
        (["check", "tp2", "--decode", "-1"], "--decode -1"),
        (["check", "tp2", "--chunk", "-1"], "--chunk -1"),
        (["check", "tp2", "--tokens", "0", "--decode", "1"], "--tokens 0"),
        (["check", "tp2", "--tokens", "9", "--sequences", "9", "--chunk", "2"], "--sequences 9"),
        (["check", "tp2", "--decode", "4000"], "--decode 4000"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # argparse takes a value that begins with a dash for an option.
    if "--prompt" in arguments:
        at = arguments.index("--prompt")
        if len(arguments) > at + 1:
            arguments = [*arguments[:at], f"--prompt={arguments[at + 1]}", *arguments[at + 2 :]]
    try:
        code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1, err


def test_generate_prints_tokens_and_prompt_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "tp2pp2", "--prompt", "1,2,3;4", "--tokens", "3"]
    assert main([*arguments, "--against", "tp2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["topology"] == "tp2pp2" and found["steps"] == 3
    one, other = found["requests"]
    assert set(one) == REQUEST
    assert one["prompt"] == [1, 2, 3] and other["prompt"] == [4]
    assert len(one["prompt_logprobs"]) == 2 and other["prompt_logprobs"] == []
    assert len(one["tokens"]) == len(other["tokens"]) == len(one["logprobs"]) == 3
    assert all(0 <= token < 256 for token in one["tokens"])
    assert found["against"]["same_tokens"] is True
    assert found["against"]["max_abs_delta"] == found["against"]["bound"] == 0
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"tokens           {','.join(map(str, one['tokens']))}" in out
    assert "steps a second" in out.splitlines()[-1]


def test_seeded_sampling_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = []
    for seed in ("1", "1", "2"):
        arguments = ["generate", "tp1", "--prompt", "1,2", "--tokens", "8", "--seed-sampling", seed]
        assert main([*arguments, "--temperature", "3", "--json"]) == 0
        drawn.append(json.loads(capsys.readouterr().out)["requests"][0]["tokens"])
    assert drawn[0] == drawn[1] != drawn[2]


def test_check_in_steps_has_requests_and_steps(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "tp2pp2", "--requests", "3", "--decode", "2", "--chunk", "3"]
    assert main([*arguments, "--against", "tp2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["violated_step"] is None and found["attention"] == "model"
    assert len(found["requests"]) == found["sequences"] == 3
    assert all(set(request) == REQUEST for request in found["requests"])
    assert all(step["ok"] for step in found["steps"])
    assert {"request", "start", "length", "decode"} == set(found["steps"][0]["parts"][0])
    assert found["tokens"] == sum(step["tokens"] for step in found["steps"])
    mixed = [{part["decode"] for part in step["parts"]} for step in found["steps"]]
    assert {0, 1} in mixed, "no step has a chunk and a decode"
    assert found["against"]["same_tokens"] and found["against"]["max_abs_delta"] == 0
    # The keys of a plain check are there as well.
    assert {"name", "ok", "what", "where", "why"} <= set(found["checks"][0])
    assert found["ledger"]["collectives"] > 0 and found["taps"]


def test_check_in_steps_is_told_in_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tp2", "--tokens", "5", "--sequences", "2", "--decode", "3"]) == 0
    out = capsys.readouterr().out
    assert "2 requests, prompts of 3, 2 tokens: 4 steps, 3 of them with tokens to decode" in out
    assert "likewise in 3 more steps" in out
    assert "tp2 holds" in out.strip().splitlines()[-1]
