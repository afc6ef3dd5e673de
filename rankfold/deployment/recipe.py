"""A recipe as a deployment: its workers and degrees, with a tiny model in place of its own."""

from __future__ import annotations

from dataclasses import dataclass

from rankfold.deployment.fleet import Deployment, Fleet
from rankfold.options import MEGA_MOE
from rankfold.recipe.flags import flag, whole
from rankfold.recipe.loader import read
from rankfold.recipe.source import BadRecipe, Source
from rankfold.recipe.view import Recipe, Side, is_recipe, read_recipe
from sim import Topology

_CONTEXT = ("prefill-context-parallel-size", "decode-context-parallel-size")
_NOT_FOLDED = {
    "speculative-config": "speculative decoding",
    "kv-cache-dtype": "the dtype of the KV caches",
    "kv-offloading-backend": "offloading of KV caches",
    "lora-modules": "LoRA",
    "enable-eplb": "balancing of experts",
    "enable-dbo": "overlap of two batches",
}
"""Flags that change what is computed or what crosses ranks, and are left out."""


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A recipe, folded."""

    path: str
    deployment: Deployment
    moe_backend: str
    """"auto", or MegaMoE where a side asks for it."""
    notes: tuple[str, ...]
    """What of it is not folded."""


def fold(path: str) -> Folded:
    """Read a recipe as a deployment.

    Raises:
        UsageError: it cannot be read, or its workers cannot be told or folded; in one line with
            the file, the line and what to do.
    """
    source = read(path)
    if not is_recipe(source):
        raise BadRecipe(
            f"{path}:1: is no recipe; give the recipe that the entry's CONFIG_FILE names"
        )
    recipe, _ = read_recipe(source)
    if recipe.model.backend is not None and recipe.model.backend.type not in (None, "vllm"):
        line = source.place(("backend", "type")).line
        raise BadRecipe(
            f"{path}:{line}: backend.type is {recipe.model.backend.type}; only vllm is folded"
        )
    fleets = {side.name: _fleet(source, side) for side in recipe.sides}
    if "prefill" in fleets and "decode" in fleets:
        deployment = Deployment(prefill=fleets["prefill"], decode=fleets["decode"])
    elif "agg" in fleets:
        deployment = Deployment(decode=fleets["agg"])
    else:
        line = source.place(("resources",)).line
        raise BadRecipe(
            f"{path}:{line}: resources name no workers that serve: write prefill_workers and "
            "decode_workers, or agg_workers"
        )
    return Folded(
        path=path,
        deployment=deployment,
        moe_backend=_moe_backend(recipe),
        notes=tuple(_notes(source, recipe)),
    )


def deployment_or_recipe(text: str) -> Folded:
    """A deployment from its word, or from a recipe if that is what the text is a file of."""
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return fold(text)
    return Folded(path="", deployment=Deployment.parse(text), moe_backend="auto", notes=())


def _fleet(source: Source, side: Side) -> Fleet:
    line = source.place(side.flags_at).line
    for name in _CONTEXT:
        if (whole(side.flags, name, 1) or 1) > 1:
            raise BadRecipe(f"{source.path}:{line}: {side.name}: {name} is not folded")
    degrees = side.degrees
    if degrees is None and side.gpus == 1:
        topology = Topology()
    elif degrees is None:
        raise BadRecipe(
            f"{source.path}:{line}: {side.name}: no parallel size is written for {side.gpus} GPUs "
            "a worker; write tensor-parallel-size, data-parallel-size or pipeline-parallel-size"
        )
    elif side.settled is None:
        raise BadRecipe(
            f"{source.path}:{line}: {side.name}: {degrees.word} has {degrees.gpus} ranks, and a "
            f"worker {side.gpus} GPUs; see rankfold recipe lint"
        )
    else:
        spread = degrees.ep and degrees.tp * degrees.dp > 1
        topology = Topology(tp=degrees.tp, pp=degrees.pp, dp=degrees.dp, ep=spread)
    return Fleet(topology=topology, workers=side.workers)


def _moe_backend(recipe: Recipe) -> str:
    asked = {flag(side.flags, "moe-backend") for side in recipe.sides}
    return MEGA_MOE if MEGA_MOE in asked else "auto"


def _notes(source: Source, recipe: Recipe) -> list[str]:
    notes = []
    if recipe.model.model is not None and recipe.model.model.precision:
        notes.append(f"precision {recipe.model.model.precision}: weights are of --dtype")
    for side in recipe.sides:
        for name, what in _NOT_FOLDED.items():
            if flag(side.flags, name) is not None:
                line = source.place(side.flags_at).line
                notes.append(f"{side.name}: {what} ({name}, from line {line}) is left out")
    return notes
