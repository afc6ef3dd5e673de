"""`config-file` and `entry`: entries of a master configuration against the recipes they name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rankfold.recipe.finding import Finding
from rankfold.recipe.flags import words
from rankfold.recipe.keys import NEAR, near
from rankfold.recipe.master import MasterEntry, MasterSide, Point
from rankfold.recipe.rules.name import GPUS, PRECISIONS
from rankfold.recipe.source import Path
from rankfold.recipe.view import Recipe, Side

CONFIG_FILE = "config-file"
RULE = "entry"

ENGINES = {"vllm": "vllm", "sglang": "sglang", "trt": "trtllm", "trtllm": "trtllm"}
"""Words of `framework`, and the backend that each is."""


def missing(entry: MasterEntry, at: Path, named: str, nearest: str) -> Finding:
    """The finding for a CONFIG_FILE that is not there."""
    return entry.source.finding(
        CONFIG_FILE,
        at,
        f"{entry.key}: CONFIG_FILE {named[:160]} does not exist",
        f"write CONFIG_FILE={nearest}" if nearest else "name a recipe that is there",
    )


def check_point(entry: MasterEntry, point: Point, recipe: Recipe) -> Iterator[Finding]:
    """Findings about a point of a sweep and its recipe."""
    for name in ("prefill", "decode"):
        ours, theirs = point.sides.get(name), recipe.side(name)
        if ours is not None and theirs is not None:
            yield from _side(entry, ours, theirs, recipe)
    benchmark = recipe.model.benchmark
    for key in ("isl", "osl"):
        ours, theirs = getattr(point, key), getattr(benchmark, key) if benchmark else None
        if ours and theirs and ours != theirs:
            yield _differs(
                entry, (*point.scenario_at, key), f"{key} is {ours}", recipe,
                ("benchmark", key), f"benchmark.{key} {theirs}", f"write {key}: {theirs}",
            )  # fmt: skip
    # An entry may run some of a recipe's points only, but none that the recipe does not have.
    if recipe.concurrencies and not set(point.concurrencies) <= set(recipe.concurrencies):
        points = ", ".join(map(str, recipe.concurrencies))
        yield _differs(
            entry, (*point.at, "conc-list"),
            f"conc-list is {', '.join(map(str, point.concurrencies))}", recipe,
            ("benchmark", "concurrencies"), f"concurrencies {points}",
            f"write conc-list: [{points}]",
        )  # fmt: skip


def _side(entry: MasterEntry, ours: MasterSide, theirs: Side, recipe: Recipe) -> Iterator[Finding]:
    if ours.workers != theirs.workers:
        yield _differs(
            entry, (*ours.at, "num-worker"), f"{theirs.name} num-worker is {ours.workers}", recipe,
            ("resources", f"{theirs.name}_workers"), f"{theirs.workers} workers",
            f"write num-worker: {theirs.workers}",
        )  # fmt: skip
    if theirs.degrees is None:
        return
    is_ = theirs.degrees
    if ours.degrees is None:
        wrong = True
    elif theirs.gpus == 1 or is_.gpus == 1:
        wrong = ours.degrees.gpus != is_.gpus
    else:
        wrong = ours.degrees != is_
        if ours.degrees.pp == 1 and is_.pp > 1:
            wrong = False  # Stages are often left out of an entry.
    if wrong:
        said = ours.degrees.word if ours.degrees else "tp, ep and dp-attn, which contradict"
        wide = is_.dp if is_.dp > 1 else is_.tp
        yield _differs(
            entry, (*ours.at, "tp"), f"{theirs.name} is {said}", recipe, theirs.flags_at, is_.word,
            f"write tp: {wide}, ep: {wide if is_.ep else 1}, dp-attn: {str(is_.dp > 1).lower()}",
        )  # fmt: skip


def check_entry(entry: MasterEntry, recipes: list[Recipe]) -> Iterator[Finding]:
    """Findings about an entry's own words, and about them and its recipes."""
    yield from _key(entry)
    yield from _words(entry)
    yield from _switches(entry, recipes)
    for recipe in recipes:
        model, backend = recipe.model.model, recipe.model.backend
        ours = PRECISIONS.get((entry.model.precision or "").lower())
        theirs = PRECISIONS.get((model.precision or "").lower()) if model else None
        if ours and theirs and ours != theirs:
            yield _differs(
                entry, (*entry.at, "precision"), f"precision is {ours}", recipe,
                ("model", "precision"), theirs, f"write precision: {theirs}",
            )  # fmt: skip
        engine = _engine(entry)
        if engine and backend and backend.type in ENGINES.values() and backend.type != engine:
            yield _differs(
                entry, (*entry.at, "framework"), f"framework is {entry.model.framework}", recipe,
                ("backend", "type"), f"backend {backend.type}", f"name {backend.type}",
            )  # fmt: skip
        gpu, kind = _gpu(entry.model.runner or ""), (recipe.resources.gpu_type or "").lower()
        if gpu and kind in GPUS and gpu != kind:
            yield _differs(
                entry, (*entry.at, "runner"), f"runner is {entry.model.runner}", recipe,
                ("resources", "gpu_type"), kind, f"use a runner of {kind}",
            )  # fmt: skip


def _key(entry: MasterEntry) -> Iterator[Finding]:
    """The key is `<prefix>-<precision>-<gpu>-<framework>`: its words against the fields."""
    parts = re.split(r"[^a-z0-9.]+", entry.key.lower())
    said = [PRECISIONS[part] for part in parts if part in PRECISIONS]
    is_ = PRECISIONS.get((entry.model.precision or "").lower())
    where = entry.source.keys[entry.at]
    if len(said) == 1 and is_ and said[0] != is_:
        message = f"the key says {said[0]}, and precision is {entry.model.precision}"
        yield entry.source.finding(RULE, where, f"{entry.key}: {message}", "make them agree")
    gpus = [part for part in parts if part in GPUS]
    runner = _gpu(entry.model.runner or "")
    if len(gpus) == 1 and runner and gpus[0] != runner:
        message = f"the key says {gpus[0]}, and runner is {entry.model.runner}"
        yield entry.source.finding(RULE, where, f"{entry.key}: {message}", "make them agree")
    engines = {ENGINES[part] for part in parts if part in ENGINES}
    engine = _engine(entry)
    if len(engines) == 1 and engine and engines != {engine}:
        message = f"the key says {engines.pop()}, and framework is {entry.model.framework}"
        yield entry.source.finding(RULE, where, f"{entry.key}: {message}", "make them agree")


WORDS = {
    ("precision",): frozenset(PRECISIONS),
    ("framework",): words(
        "vllm sglang trt atom dynamo-vllm dynamo-sglang dynamo-trt dynamo-trtllm llm-d llm-d-vllm "
        "sglang-disagg vllm-disagg tilert"
    ),
    ("router", "name"): words("dynamo-router vllm-router sglang-router mori-router"),
    ("kv-p2p-transfer",): words("nixl mooncake moriio mori ucx lmcache"),
}
"""Values that the field has, for keys of an entry that have few."""


def _words(entry: MasterEntry) -> Iterator[Finding]:
    """Words that are nearly known ones."""
    for path, known in WORDS.items():
        value = entry.source.get((*entry.at, *path))
        if isinstance(value, str) and value.lower() not in known:
            like = near(value.lower(), known, 0.6 if path == ("precision",) else NEAR)
            if like:
                yield entry.source.finding(
                    "unknown-value",
                    (*entry.at, *path),
                    f"{entry.key}: {path[-1]} is {value[:60]!r}, which is nearly {like}",
                    f"write {like}",
                )
    for part in re.split(r"[^a-z0-9]+", (entry.model.runner or "").lower()):
        if re.fullmatch(r"(?:gb|b|h)\d{3}", part) and part not in (*GPUS, "h800"):
            yield entry.source.finding(
                "unknown-value",
                (*entry.at, "runner"),
                f"{entry.key}: runner has the GPU {part}, which there is not",
                f"write one of {', '.join(GPUS)}",
            )
    prefix, first = entry.model.model_prefix, entry.key.partition("-")[0]
    if prefix and not entry.key.startswith(f"{prefix}-") and near(prefix, [first]):
        yield entry.source.finding(
            RULE,
            (*entry.at, "model-prefix"),
            f"{entry.key}: model-prefix is {prefix}, and the key begins with {first}",
            f"write model-prefix: {first}",
        )


def _switches(entry: MasterEntry, recipes: list[Recipe]) -> Iterator[Finding]:
    """`disagg` and `multinode` against what the points and recipes are."""
    where = entry.source.keys[entry.at]
    if any(len(point.sides) == 2 for point in entry.points) and not entry.model.disagg:
        yield entry.source.finding(
            RULE, where, f"{entry.key}: prefill and decode have workers, and disagg is not true",
            "write disagg: true",
        )  # fmt: skip
    for recipe in recipes:
        nodes = sum(side.nodes or 0 for side in recipe.sides)
        if nodes > 1 and not entry.model.multinode:
            yield _differs(
                entry, (*entry.at, "multinode"), "multinode is not true", recipe, ("resources",),
                f"{nodes} nodes", "write multinode: true",
            )  # fmt: skip


def _engine(entry: MasterEntry) -> str | None:
    parts = re.split(r"[^a-z0-9]+", (entry.model.framework or "").lower())
    found = {ENGINES[part] for part in parts if part in ENGINES}
    return found.pop() if len(found) == 1 else None


def _gpu(runner: str) -> str | None:
    parts = [part for part in re.split(r"[^a-z0-9]+", runner.lower()) if part in GPUS]
    return parts[0] if len(parts) == 1 else None


def _differs(
    entry: MasterEntry, at: Path, said: str, recipe: Recipe, there: Path, is_: str, suggestion: str
) -> Finding:
    line = recipe.source.place(there).line
    return entry.source.finding(
        RULE, at, f"{entry.key}: {said}, and {recipe.source.path}:{line} has {is_}", suggestion
    )
