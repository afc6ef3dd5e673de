"""`unknown-flag`, `flag-value` and `unknown-value`: words that the engine would not understand.

A flag that vLLM 0.33 does not have may be another version's, and a new GPU or benchmark may have a
new name. So a word is a finding only where it is nearly a known one, which is how misspellings
look. A flag in JSON must be JSON, a size a whole number, and a switch on or off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import NoneType
from typing import Any

from rankfold.recipe.finding import Finding
from rankfold.recipe.flags import INTEGERS, JSON, KNOWN, SWITCHES, dashed, is_known, whole, words
from rankfold.recipe.keys import near
from rankfold.recipe.source import Path
from rankfold.recipe.view import Recipe, Side

RULE = "unknown-flag"
VALUE = "flag-value"
WORD = "unknown-value"

WORDS: dict[Path, frozenset[str]] = {
    ("model", "precision"): words("fp4 nvfp4 mxfp4 fp8 mxfp8 fp16 bf16 int4 int8 fp32"),
    ("resources", "gpu_type"): words(
        "gb200 gb300 gb10 b200 b300 h100 h200 h20 h800 a100 a800 l40s vr200 mi300x mi325x mi350x "
        "mi355x"
    ),
    ("backend", "type"): words("vllm sglang trtllm mocker atom tilert"),
    ("backend", "connector"): words("nixl lmcache lmcache-mp kvbm moriio mooncake"),
    ("frontend", "type"): words(
        "dynamo sglang sglang-router vllm vllm-router trtllm_serve tilert-router atomesh none"
    ),
    ("benchmark", "type"): words(
        "sa-bench custom manual router mooncake-router gsm8k mmlu gpqa longbenchv2 "
        "trace-replay aiperf"
    ),
    ("benchmark", "req_rate"): frozenset(["inf"]),
}
"""Values that the field has, for keys that have few."""

FLAG_WORDS = {
    "kv-cache-dtype": words("auto float16 bfloat16 fp8 fp8_e4m3 fp8_e5m2 fp8_inc fp8_ds_mla nvfp4"),
}
TIME = re.compile(r"(?:\d{1,3}-)?\d{1,4}(?::\d{2}){0,2}")
"""SLURM's forms of a time limit, in text: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s."""
LENGTH = re.compile(r"0*[1-9]\d*|\d+(?:\.\d+)?[kKmMgG]")
"""vLLM's forms of a length in tokens."""


def check(recipe: Recipe) -> Iterator[Finding]:
    """Findings about single words and values."""
    for path, known in WORDS.items():
        yield from _word(recipe, path, recipe.source.get(path), known)
    limit = recipe.model.slurm.time_limit if recipe.model.slurm else None
    if isinstance(limit, str) and not TIME.fullmatch(limit):
        yield recipe.source.finding(
            WORD,
            ("slurm", "time_limit"),
            f"slurm.time_limit is {limit[:40]!r}",
            'write hours, minutes and seconds, such as "8:00:00"',
        )
    backend = recipe.model.backend
    if backend is None or backend.type != "vllm" or backend.vllm_config is None:
        return
    for section in ("prefill", "decode", "aggregated"):
        at = ("backend", "vllm_config", section)
        yield from _flags(recipe, at, getattr(backend.vllm_config, section) or {})


def _word(recipe: Recipe, path: Path, value: Any, known: frozenset[str]) -> Iterator[Finding]:
    if not isinstance(value, str) or value.lower() in known or value.startswith("{"):
        return
    like = near(value.lower(), known, 0.6)
    if like:
        yield recipe.source.finding(
            WORD, path, f"{path[-1]} is {value[:60]!r}, which is nearly {like}", f"write {like}"
        )


def _flags(recipe: Recipe, at: Path, flags: dict[str, Any]) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for name, value in flags.items():
        path, full = (*at, name), dashed(name)
        where = recipe.source.keys[path]
        if full in seen:
            yield recipe.source.finding(
                VALUE, where, f"{name} is {seen[full]} in another spelling", "keep one of them"
            )
        seen[full] = name
        opposite = full.removeprefix("no-") if full.startswith("no-") else f"no-{full}"
        if opposite in seen and value is True and flags.get(seen[opposite]) is True:
            yield recipe.source.finding(
                VALUE, where, f"{seen[opposite]} and {name} are both true", "keep one of them"
            )
        if not is_known(name):
            like = near(full, [*KNOWN, *(f"no-{one}" for one in KNOWN)], 0.85)
            if like:
                yield recipe.source.finding(
                    RULE, where, f"vLLM has no flag --{full}", f"write {like}"
                )
            continue
        yield from _value(recipe, path, full, value, flags)


def _value(
    recipe: Recipe, path: Path, name: str, value: Any, flags: dict[str, Any]
) -> Iterator[Finding]:
    if name in INTEGERS and whole(flags, str(path[-1])) is None:
        yield recipe.source.finding(
            VALUE, path, f"{name} is {str(value)[:40]!r}", "write a whole number, 1 or more"
        )
    bare = name.removeprefix("no-")
    if bare in SWITCHES and not isinstance(value, bool) and value is not None:
        yield recipe.source.finding(
            VALUE, path, f"{name} is {str(value)[:40]!r}", "write true or false"
        )
    if name == "max-model-len" and not _is_length(value):
        yield recipe.source.finding(
            VALUE, path, f"{name} is {str(value)[:40]!r}", "write tokens, such as 9472 or 16k"
        )
    if name in JSON and not isinstance(value, str | dict | NoneType):
        yield from _no_json(recipe, path, name, value)
    if name in JSON and isinstance(value, str):
        try:
            json.loads(value)
        except ValueError as error:
            yield recipe.source.finding(
                VALUE, path, f"{name} is no JSON: {error}", "close what is open, and quote keys"
            )
        except RecursionError:
            yield recipe.source.finding(VALUE, path, f"{name} is nested too deep", "write less")
    if name in FLAG_WORDS:
        yield from _word(recipe, path, value, FLAG_WORDS[name])


def _no_json(recipe: Recipe, path: Path, name: str, value: Any) -> Iterator[Finding]:
    """A flag in JSON may also be a mapping; only a compilation level is a bare number."""
    if name != "compilation-config":
        yield recipe.source.finding(
            VALUE, path, f"{name} is {str(value)[:40]!r}", "write JSON in quotes, or a mapping"
        )


def _is_length(value: Any) -> bool:
    """Whether vLLM reads a value as a number of tokens: 9472, 16k, 1.5M; -1 and auto are free."""
    if isinstance(value, bool) or value is None:
        return value is None
    if isinstance(value, int):
        return value == -1 or value > 0
    text = str(value).strip()
    return text in ("auto", "-1") or bool(LENGTH.fullmatch(text))


def connectors(side: Side) -> frozenset[str]:
    """The KV connectors that a side's `kv-transfer-config` names; empty if it cannot be read."""
    written = side.flags.get("kv-transfer-config", side.flags.get("kv_transfer_config"))
    if isinstance(written, str):
        try:
            written = json.loads(written)
        except (ValueError, RecursionError):
            return frozenset()
    found: set[str] = set()
    left = [written]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if isinstance(value.get("kv_connector"), str):
                found.add(value["kv_connector"])
            left += value.values()
        elif isinstance(value, list):
            left += value
    return frozenset(found)
