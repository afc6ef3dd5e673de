"""What full-scale commands write is read; broken and foreign files are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankfold.errors import UsageError
from rankfold.gpu.readers import Accuracy, Logprobs, Throughput, read

DATA = Path(__file__).parent / "data"


def test_gsm8k_of_vllm() -> None:
    [found] = read(str(DATA / "gsm8k_eval.json"))
    assert found == Accuracy(arm="gsm8k_eval", accuracy=0.9598180439727066, questions=1319)


def test_gsm8k_of_lm_eval_takes_the_strict_filter() -> None:
    [found] = read(f"pp2={DATA / 'lm_eval.json'}")
    assert found == Accuracy(arm="pp2", accuracy=0.8870356330553449, questions=1319)


def test_prompt_logprobs_come_in_the_order_of_the_prompts() -> None:
    [found] = read(f"pp1={DATA / 'completions.json'}")
    assert isinstance(found, Logprobs)
    assert found.prompts == (((5, -1.5), (9, -0.125)), ((18, -0.25),))
    assert found.positions == 3


def test_answers_to_single_prompts_are_put_together(tmp_path: Path) -> None:
    answer = json.loads((DATA / "completions.json").read_text())
    singles = [{**answer, "choices": [choice]} for choice in answer["choices"]]
    for text in ("\n".join(map(json.dumps, singles)), json.dumps(singles)):
        (tmp_path / "answers.json").write_text(text)
        [found] = read(str(tmp_path / "answers.json"))
        assert isinstance(found, Logprobs)
        assert found.prompts == (((18, -0.25),), ((5, -1.5), (9, -0.125)))


def test_throughput_of_bench_serve() -> None:
    [found] = read(f"on={DATA / 'bench_serve.json'}")
    assert isinstance(found, Throughput)
    assert (found.tokens_per_second, found.date) == (2007.0, "20251201-101500")
    assert found.workload == "512 prompts, 262144 input tokens, 64 at a time"


def test_several_runs_in_one_file(tmp_path: Path) -> None:
    """As `--append-result` writes them."""
    text = (DATA / "bench_serve.json").read_text()
    (tmp_path / "runs.json").write_text(f"{text.strip()}\n{text}")
    assert len(read(str(tmp_path / "runs.json"))) == 2


def test_throughput_of_bench_throughput() -> None:
    [found] = read(str(DATA / "bench_throughput.json"))
    assert isinstance(found, Throughput)
    assert (found.tokens_per_second, found.date) == (8192.0, "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("{", "it is no JSON"),
        ("[1, 2]", "an object was expected"),
        ('{"loss": 1.0}', "it is none of"),
        ('{"accuracy": 95.98}', "accuracy is 95.98, not a number from 0 to 1"),
        ('{"accuracy": "high"}', "accuracy is 'high'"),
        ('{"results": {"mmlu": {"acc,none": 0.7}}}', "without gsm8k (tasks: mmlu)"),
        ('{"results": {"gsm8k": {"alias": "gsm8k"}}}', "without exact_match"),
        ('{"choices": []}', "without choices"),
        ('{"choices": [{"index": 0, "text": ""}]}', "without prompt_logprobs"),
        ('{"choices": [{"prompt_logprobs": [null, 3]}]}', "3 where a token belongs"),
        ('{"choices": [7]}', "7 where a choice belongs"),
        ('{"output_throughput": 0.0, "failed": 0}', "output_throughput is 0.0"),
        ('{"output_throughput": 10.0, "failed": 3}', "3 requests of the benchmark failed"),
    ],
)
def test_a_broken_or_foreign_file_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "given.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read(str(path))
    assert says in str(caught.value)
    assert "given.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [("nothing.json", "No such file"), ("on=", "ARM=FILE"), ("=a.json", "ARM=FILE")],
)
def test_a_file_that_is_not_there_is_one_line(given: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(given)


def test_a_path_may_hold_an_equals_sign(tmp_path: Path) -> None:
    folder = tmp_path / "seed=1"
    folder.mkdir()
    (folder / "eval.json").write_text((DATA / "gsm8k_eval.json").read_text())
    assert read(str(folder / "eval.json"))[0].arm == "eval"
    assert read(f"pp2={folder / 'eval.json'}")[0].arm == "pp2"
