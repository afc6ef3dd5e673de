"""A recipe as the rules see it: its sides, with workers, GPUs, nodes and degrees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rankfold.recipe.finding import Finding
from rankfold.recipe.flags import flag, switched, whole
from rankfold.recipe.keys import dotted, fit
from rankfold.recipe.schema import REQUIRED, RecipeModel, Resources
from rankfold.recipe.source import BadRecipe, Path, Place, Source
from rankfold.recipe.words import Degrees

DEFAULT_GPUS_PER_NODE = 4
"""srt-slurm's, where `resources.gpus_per_node` is not written."""

SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


@dataclass(frozen=True, kw_only=True)
class Side:
    """The workers of one kind.

    Invariant: `workers >= 1`, `gpus >= 1`.
    """

    name: str
    """prefill, decode or agg."""
    workers: int
    gpus: int
    """GPUs of each worker: as written, or as srt-slurm works it out from the nodes."""
    gpus_written: bool
    nodes: int | None
    """None if it is not written; 0 if the side shares the other's nodes."""
    flags: Mapping[str, Any]
    flags_at: Path
    degrees: Degrees | None
    """How a worker is parallel, by its flags; None if no size is written or one is unreadable."""

    @property
    def settled(self) -> Degrees | None:
        """The degrees, if they fit the GPUs. If not, one of them is wrong, and which is not known:
        names and comments are then not compared with either."""
        if self.degrees is None:
            return None
        context = whole(self.flags, "prefill-context-parallel-size", 1) or 1
        return self.degrees if self.degrees.gpus * context == self.gpus else None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe, and what of it could be read."""

    source: Source
    model: RecipeModel
    sides: tuple[Side, ...]

    @property
    def resources(self) -> Resources:
        """`resources`, empty if there are none."""
        return self.model.resources or Resources()

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node."""
        return self.resources.gpus_per_node or DEFAULT_GPUS_PER_NODE

    def side(self, name: str) -> Side | None:
        """The side of a name."""
        return next((side for side in self.sides if side.name == name), None)

    @property
    def serving(self) -> Side | None:
        """The side whose workers hold running requests: decode, or the only one."""
        return self.side("decode") or self.side("agg")

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The load points of the benchmark; empty if there are none or they are unreadable."""
        written = self.model.benchmark.concurrencies if self.model.benchmark else None
        return concurrencies_of(written) or ()


def concurrencies_of(written: str | int | list[int] | None) -> tuple[int, ...] | None:
    """Load points written as a number, a list or "8x16x32"; None if they are not so written."""
    if written is None:
        return ()
    if isinstance(written, int):
        return (written,)
    if isinstance(written, list):
        return tuple(written)
    parts = [part.strip() for part in written.split("x")]
    if not all(p.isascii() and p.isdecimal() and len(p) < 7 and int(p) > 0 for p in parts):
        return None
    return tuple(int(part) for part in parts)


def is_recipe(source: Source) -> bool:
    """Whether a file is meant to be a recipe."""
    data = source.data
    return "resources" in data or "backend" in data or isinstance(data.get("model"), dict)


def read_recipe(source: Source) -> tuple[Recipe, list[Finding]]:
    """Read a recipe; what does not fit the schema is told and left out.

    Raises:
        BadRecipe: it is written in srt-slurm's layout 2, which has other keys.
    """
    if source.data.get("schema") not in (None, 1) or "roles" in source.data:
        line = source.place(("schema",)).line if "schema" in source.data else 1
        raise BadRecipe(
            f"{source.path}:{line}: is written in layout 2 (engine, roles); layout 1 is read here"
        )
    model, findings, dropped = fit(source, (), RecipeModel)
    findings += _missing(source, model)
    sides = tuple(_sides(source, model, dropped))
    return Recipe(source=source, model=model, sides=sides), findings


def _missing(source: Source, model: RecipeModel) -> Iterator[Finding]:
    required: list[Path] = list(REQUIRED)
    resources = model.resources or Resources()
    written = source.get(("resources",))
    kinds = {key.rpartition("_")[0] for key in written} if isinstance(written, dict) else set()
    if kinds & {"prefill", "decode"}:
        sides = ("prefill", "decode")
        required += [("resources", f"{s}_{what}") for s in sides for what in ("workers", "nodes")]
    elif resources.agg_workers is None:
        required.append(("resources", "agg_workers"))
    if model.backend is not None and model.backend.vllm_config is not None:
        required.append(("backend", "type"))  # Else it is sglang, which has no vllm_config.
    for path in required:
        parent = source.get(path[:-1])
        if isinstance(parent, dict) and parent.get(str(path[-1])) is None:
            where = source.keys.get(path[:-1], Place(line=1, column=1))
            yield source.finding(
                "missing-key", where, f"{dotted(path)} is missing", f"write {path[-1]}: ..."
            )


def _sides(source: Source, model: RecipeModel, dropped: frozenset[Path]) -> Iterator[Side]:
    resources = model.resources or Resources()
    for name in ("prefill", "decode", "agg"):
        read = {f"{name}_nodes", f"{name}_workers", f"gpus_per_{name}", "gpus_per_node"}
        if any(("resources", key) in dropped for key in read):
            continue
        workers = getattr(resources, f"{name}_workers")
        if not workers:
            continue
        nodes = getattr(resources, f"{name}_nodes")
        written = getattr(resources, f"gpus_per_{name}")
        at: Path = ("backend", "vllm_config", "aggregated" if name == "agg" else name)
        flags = source.get(at)
        flags = flags if isinstance(flags, dict) else {}
        yield Side(
            name=name,
            workers=workers,
            gpus=written or _worked_out(resources, name, workers, nodes),
            gpus_written=written is not None,
            nodes=nodes,
            flags=flags,
            flags_at=at,
            degrees=degrees_of_flags(flags),
        )


def _worked_out(resources: Resources, name: str, workers: int, nodes: int | None) -> int:
    """GPUs of a worker where they are not written, as srt-slurm's ResourceConfig has it."""
    per_node = resources.gpus_per_node or DEFAULT_GPUS_PER_NODE
    if nodes:
        return max(1, nodes * per_node // workers)
    if name == "decode" and nodes == 0:
        if resources.gpus_per_prefill:
            return resources.gpus_per_prefill
        if resources.prefill_nodes and resources.prefill_workers:
            return max(1, resources.prefill_nodes * per_node // resources.prefill_workers)
    return per_node


def degrees_of_flags(flags: Mapping[str, Any]) -> Degrees | None:
    """How the flags make a worker parallel; None if they do not say."""
    written = [size for size in SIZES if flag(flags, size) is not None]
    if not written or any(whole(flags, size) is None for size in written):
        return None
    tp, pp, dp = (whole(flags, size, 1) or 1 for size in SIZES)
    return Degrees(tp=tp, pp=pp, dp=dp, ep=switched(flags, "enable-expert-parallel"))
