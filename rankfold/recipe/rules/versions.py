"""`version`: versions and images that disagree between router, recipe and runtime.

What a run installs is the recipe's `dynamo.version` in the recipe's `model.container`. The master
configuration's `router.version` and `image` are what results are labelled with, and `identity` is
what the run must find itself to be. Versions are compared as text; only where two are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rankfold.recipe.finding import Finding
from rankfold.recipe.master import MasterEntry
from rankfold.recipe.view import Recipe

RULE = "version"

_IMAGE = re.compile(r"[^\s/]+(?:/[^\s/]+)+:[^\s/:]+")
"""A container that is named as an image of a registry, not by a cluster's own alias."""
_WHEEL = re.compile(r"(?:.*/)?ai_dynamo-(?P<version>[^-]+)-[^/]*\.whl")


def dynamo_version(recipe: Recipe) -> tuple[str, str] | None:
    """The version of Dynamo that is installed, and the key that says so; None if none does."""
    dynamo = recipe.model.dynamo
    if dynamo is None or dynamo.hash or dynamo.top_of_tree:
        return None
    if dynamo.wheel:
        match = _WHEEL.fullmatch(dynamo.wheel)
        return (match["version"] if match else dynamo.wheel), "wheel"
    return (dynamo.version, "version") if dynamo.version else None


def check(recipe: Recipe) -> Iterator[Finding]:
    """Findings about versions within a recipe."""
    identity, installed = recipe.model.identity, dynamo_version(recipe)
    dynamo = recipe.model.dynamo
    if dynamo and dynamo.hash and dynamo.top_of_tree:
        yield recipe.source.finding(
            RULE, ("dynamo", "top_of_tree"), "dynamo has a hash and top_of_tree", "keep one of them"
        )
    if identity is None:
        return
    frameworks = identity.frameworks or {}
    claimed = frameworks.get("dynamo")
    if claimed and installed and _bare(claimed) != _bare(installed[0]):
        yield recipe.source.finding(
            RULE,
            ("identity", "frameworks", "dynamo"),
            f"identity has Dynamo {claimed}, and dynamo.{installed[1]} installs {installed[0]}",
            f'write dynamo: "{installed[0]}"',
        )
    container = recipe.model.model.container if recipe.model.model else None
    image = identity.container.image if identity.container else None
    if container and image and _differ(container, image):
        yield recipe.source.finding(
            RULE,
            ("identity", "container", "image"),
            f"identity has the image {image}, and model.container is {container}",
            f'write image: "{container}"',
        )
    engine, tag = frameworks.get("vllm"), (container or "").rpartition(":")[2]
    if engine and recipe.model.backend and recipe.model.backend.type == "vllm":
        yield from _engine(recipe, engine, tag)


def _engine(recipe: Recipe, engine: str, tag: str) -> Iterator[Finding]:
    """An image's tag names the version, v0.21.0, or the commit, nightly-5e35a6f4...: either is kept
    in vLLM's version, 0.26.1rc1.dev255+g5e35a6f4f."""
    release = re.fullmatch(r"v(\d+\.\d+\.\d+(?:\.?(?:rc|post)\d+)?)(?:-.*)?", tag)
    commit = re.search(r"nightly-([0-9a-f]{12,40})$", tag)
    local = re.search(r"\+g([0-9a-f]+)", engine)
    wrong = (release and release[1] != _bare(engine).partition("+")[0]) or (
        commit and local and not commit[1].startswith(local[1][:12])
    )
    if wrong:
        yield recipe.source.finding(
            RULE,
            ("identity", "frameworks", "vllm"),
            f"identity has vLLM {engine}, and the image's tag is {tag}",
            f'write vllm: "{release[1]}"' if release else "write the version of that image",
        )


def check_entry(entry: MasterEntry, recipes: Sequence[Recipe]) -> Iterator[Finding]:
    """Findings about an entry and the recipes that it names."""
    router, at = entry.router, (*entry.at, "router", "version")
    if router and router.version and "dynamo" in (router.name or "dynamo").lower():
        installed: dict[str, str] = {}
        for recipe in recipes:
            found = dynamo_version(recipe)
            if found:
                where = recipe.source.place(("dynamo", found[1]))
                installed.setdefault(found[0], f"{recipe.source.path}:{where.line}")
        others = {v: w for v, w in installed.items() if _bare(v) != _bare(router.version)}
        for recipe in recipes:
            if _installs_unnamed(recipe):
                where = recipe.source.place(("dynamo",))
                yield entry.source.finding(
                    RULE,
                    at,
                    f"{entry.key}: router.version is {router.version}, and the recipe does not say "
                    f"which Dynamo it installs ({recipe.source.path}:{where.line})",
                    f'write dynamo.version: "{router.version}" there',
                )
        if others:
            told = ", ".join(f"{version} ({where})" for version, where in others.items())
            one = next(iter(others)) if len(installed) == 1 else None
            yield entry.source.finding(
                RULE,
                at,
                f"{entry.key}: router.version is {router.version}, and the recipe installs Dynamo "
                f"{told}",
                f'write version: "{one}"' if one else "use one version in all recipes",
            )
    image = entry.model.image
    for recipe in recipes:
        container = recipe.model.model.container if recipe.model.model else None
        if image and container and _differ(image, container):
            where = recipe.source.place(("model", "container"))
            yield entry.source.finding(
                RULE,
                (*entry.at, "image"),
                f"{entry.key}: the image is {image}, and model.container is {container} "
                f"({recipe.source.path}:{where.line})",
                f"write image: {container}",
            )


def _installs_unnamed(recipe: Recipe) -> bool:
    """Whether srt-slurm would install the Dynamo that is its own default."""
    dynamo, frontend = recipe.model.dynamo, recipe.model.frontend
    if dynamo is None or (frontend is not None and frontend.type not in (None, "dynamo")):
        return False
    named = dynamo.version or dynamo.wheel or dynamo.hash or dynamo.top_of_tree or dynamo.source
    return not named and dynamo.install is not False


def _bare(version: str) -> str:
    return version.strip().removeprefix("v")


def _differ(one: str, other: str) -> bool:
    """Whether two images differ; enroot writes the first slash as #. Aliases are not compared."""
    a, b = (image.strip().replace("#", "/", 1) for image in (one, other))
    return bool(_IMAGE.fullmatch(a) and _IMAGE.fullmatch(b)) and a != b
