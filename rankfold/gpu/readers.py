"""Reads what the full-scale commands have written.

| what | written by | known by |
|---|---|---|
| GSM8K accuracy | vLLM's gsm8k_eval.py, `--save-results` | `accuracy` |
| | lm-eval's results file | `results` |
| prompt logprobs | the server's answer to /v1/completions, or several | `choices` |
| throughput | `vllm bench serve --save-result` | `output_throughput` |
| | `vllm bench throughput --output-json` | `tokens_per_second` |

A file may hold several documents, one after the other, as `--append-result` writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankfold.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """GSM8K."""

    arm: str
    accuracy: float
    questions: int | None
    """How many were asked, where the file says it."""


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Of the tokens of some prompts."""

    arm: str
    prompts: tuple[tuple[tuple[int, float], ...], ...]
    """For each prompt and each of its tokens but the first: the token, and its logprob."""

    @property
    def positions(self) -> int:
        """How many logprobs there are."""
        return sum(map(len, self.prompts))


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """One run of a benchmark."""

    arm: str
    workload: str
    """What was asked for: runs of the same workload are compared."""
    tokens_per_second: float
    """Output tokens of `bench serve`; input and output tokens of `bench throughput`."""
    date: str
    """"" where the file does not say it."""


Found = Accuracy | Logprobs | Throughput


def read(given: str) -> list[Found]:
    """Read a file of results.

    Args:
        given: its path, or ARM=PATH, where the arm says what ran: "pp2", "on". By default the
            arm is the file's name.

    Raises:
        UsageError: it cannot be read, or is no file of results; in one line.
    """
    arm, path = _named(given)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--read {path}: {why}") from None
    try:
        documents = list(_documents(text))
    except ValueError as error:
        raise UsageError(f"--read {path}: it is no JSON ({error})") from None
    if not documents:
        raise UsageError(f"--read {path}: it is empty")
    try:
        if any("choices" in document for document in documents):
            return [_logprobs(arm, documents)]
        return [_single(arm, document) for document in documents]
    except _Foreign as error:
        raise UsageError(f"--read {path}: {error}") from None


class _Foreign(Exception):
    """What is wrong with a file."""


def _named(given: str) -> tuple[str, Path]:
    arm, separator, rest = given.partition("=")
    if separator and "/" not in arm:
        if not arm or not rest:
            raise UsageError(f"--read {given!r}: use FILE or ARM=FILE")
        return arm, Path(rest)
    return Path(given).stem, Path(given)


def _documents(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    at = 0
    while at < len(text):
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text):
            return
        value, at = decoder.raw_decode(text, at)
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict):
                raise ValueError("an object was expected")
            yield each


def _single(arm: str, document: Mapping[str, Any]) -> Found:
    if "accuracy" in document:
        return Accuracy(
            arm=arm,
            accuracy=_share(document, "accuracy"),
            questions=_count(document.get("num_questions")),
        )
    if isinstance(document.get("results"), dict):
        return _lm_eval(arm, document)
    return _throughput(arm, document)


def _lm_eval(arm: str, document: Mapping[str, Any]) -> Accuracy:
    """lm-eval names a metric with its filter: "exact_match,strict-match"."""
    scores = document["results"].get("gsm8k")
    if not isinstance(scores, dict):
        tasks = ", ".join(map(str, document["results"])) or "none"
        raise _Foreign(f"results of lm-eval without gsm8k (tasks: {tasks})")
    metrics = [name for name in scores if str(name).startswith("exact_match,")]
    if not metrics:
        raise _Foreign("results of lm-eval for gsm8k without exact_match")
    strict = "exact_match,strict-match"
    samples = document.get("n-samples", {}).get("gsm8k", {})
    return Accuracy(
        arm=arm,
        accuracy=_share(scores, strict if strict in metrics else metrics[0]),
        questions=_count(samples.get("effective") if isinstance(samples, dict) else None),
    )


def _throughput(arm: str, document: Mapping[str, Any]) -> Throughput:
    if "output_throughput" in document:
        failed = _count(document.get("failed")) or 0
        if failed:
            raise _Foreign(f"{failed} requests of the benchmark failed; run it again")
        asked = [
            f"{document.get('num_prompts')} prompts",
            f"{document.get('total_input_tokens')} input tokens",
            f"{document.get('max_concurrency')} at a time",
        ]
        return Throughput(
            arm=arm,
            workload=", ".join(asked),
            tokens_per_second=_positive(document, "output_throughput"),
            date=str(document.get("date", "")),
        )
    if "tokens_per_second" in document and "elapsed_time" in document:
        return Throughput(
            arm=arm,
            workload=f"{document.get('num_requests')} prompts offline, "
            f"{document.get('total_num_tokens')} tokens",
            tokens_per_second=_positive(document, "tokens_per_second"),
            date="",
        )
    raise _Foreign(
        "it is none of: gsm8k_eval.py's or lm-eval's results, answers of /v1/completions, results "
        "of vllm bench serve or vllm bench throughput"
    )


def _logprobs(arm: str, documents: list[dict[str, Any]]) -> Logprobs:
    prompts: list[tuple[tuple[int, float], ...]] = []
    for document in documents:
        choices = document.get("choices")
        if not isinstance(choices, list) or not choices:
            raise _Foreign("an answer of /v1/completions without choices")
        for choice in choices:
            if not isinstance(choice, dict):
                raise _Foreign(f"choices has {choice!r} where a choice belongs")
        in_order = sorted(choices, key=lambda choice: _count(choice.get("index")) or 0)
        prompts += map(_prompt, in_order)
    return Logprobs(arm=arm, prompts=tuple(prompts))


def _prompt(choice: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """vLLM gives for each position {token id: {"logprob": ...}}, null for the first.

    With `prompt_logprobs` 0 each holds the prompt's own token alone; with more it comes first.
    """
    positions = choice.get("prompt_logprobs")
    if not isinstance(positions, list):
        raise _Foreign('an answer without prompt_logprobs; ask with "prompt_logprobs": 0')
    found = []
    for position in positions:
        if position is None:
            continue
        try:
            token, said = next(iter(position.items()))
            found.append((int(token), float(said["logprob"])))
        except (AttributeError, StopIteration, KeyError, TypeError, ValueError):
            raise _Foreign(f"prompt_logprobs has {position!r} where a token belongs") from None
    return tuple(found)


def _share(document: Mapping[str, Any], name: str) -> float:
    value = document[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise _Foreign(f"{name} is {value!r}, not a number from 0 to 1")
    return float(value)


def _positive(document: Mapping[str, Any], name: str) -> float:
    value = document[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _Foreign(f"{name} is {value!r}, not a number above 0")
    return float(value)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
