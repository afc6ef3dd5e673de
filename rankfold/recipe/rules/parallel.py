"""`parallel-size`: the ranks that a worker's flags make, against its GPUs.

vLLM starts TP x PP x DP ranks, times the prefill context-parallel size; decode context parallelism
works on the same ranks, and expert parallelism spreads experts over those of a stage.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankfold.recipe.finding import Finding
from rankfold.recipe.flags import flag, whole
from rankfold.recipe.source import Path
from rankfold.recipe.view import SIZES, Recipe, Side

RULE = "parallel-size"


def check(recipe: Recipe) -> Iterator[Finding]:
    """Findings about the sizes of workers, and sections for workers that there are not."""
    for side in recipe.sides:
        if side.degrees is None:
            continue
        context = whole(side.flags, "prefill-context-parallel-size", 1) or 1
        ranks = side.degrees.gpus * context
        if ranks != side.gpus:
            yield _mismatch(recipe, side, ranks, context)
        local = whole(side.flags, "data-parallel-size-local")
        if local is not None and local > side.degrees.dp:
            yield recipe.source.finding(
                RULE,
                _at(side, "data-parallel-size-local"),
                f"{side.name}: {local} local data-parallel ranks, of {side.degrees.dp} in all",
                f"write data-parallel-size-local: {side.degrees.dp} or less",
            )
    yield from _sections(recipe)


def _mismatch(recipe: Recipe, side: Side, ranks: int, context: int) -> Finding:
    degrees = side.degrees
    assert degrees is not None
    parts = [f"{axis.upper()}{getattr(degrees, axis)}" for axis in ("tp", "pp", "dp")]
    parts = [part for part in parts if part[2:] != "1"] or ["TP1"]
    parts += [f"PCP{context}"] * (context > 1)
    rest = ranks // degrees.dp
    dp = side.gpus // rest if side.gpus % rest == 0 else None
    size = "data-parallel-size" if degrees.dp > 1 else "tensor-parallel-size"
    if degrees.dp > 1:
        wanted = dp
    else:
        others = ranks // degrees.tp
        wanted = side.gpus // others if side.gpus % others == 0 else None
    change = f"gpus_per_{side.name}: {ranks}"
    return recipe.source.finding(
        RULE,
        _at(side, size),
        f"{side.name}: {' x '.join(parts)} makes {ranks} rank{'s' * (ranks != 1)} a worker, and "
        f"{'gpus_per_' + side.name if side.gpus_written else 'a worker'} "
        f"{'is' if side.gpus_written else 'has'} {side.gpus}",
        f"write {size}: {wanted}, or {change}" if wanted else f"write {change}",
    )


def _at(side: Side, name: str) -> Path:
    """Where a flag is written, in either spelling; else the first size that is."""
    for spelling in (name, name.replace("-", "_")):
        if spelling in side.flags:
            return (*side.flags_at, spelling)
    for size in SIZES:
        if flag(side.flags, size) is not None and size != name:
            return _at(side, size)
    return side.flags_at


def _sections(recipe: Recipe) -> Iterator[Finding]:
    backend = recipe.model.backend
    if backend is None or backend.type != "vllm" or not recipe.sides:
        return
    names = {side.name for side in recipe.sides}
    for name in ("prefill", "decode", "agg"):
        section = "aggregated" if name == "agg" else name
        flags = getattr(backend.vllm_config, section) if backend.vllm_config else None
        if name in names and flags is None:
            yield recipe.source.finding(
                RULE,
                ("backend", "vllm_config"),
                f"{name} has workers, and backend.vllm_config has no {section}",
                f"write backend.vllm_config.{section}",
            )
        unused = flags is not None and name not in names
        # Workers that could not be read are told elsewhere; a written 0 is a choice.
        if unused and getattr(recipe.resources, f"{name}_workers") is None:
            disaggregated = bool(names & {"prefill", "decode"})
            if (name == "agg") == disaggregated:
                yield recipe.source.finding(
                    RULE,
                    recipe.source.keys[("backend", "vllm_config", section)],
                    f"backend.vllm_config has {section}, and there are no {name} workers",
                    "remove the section",
                )
