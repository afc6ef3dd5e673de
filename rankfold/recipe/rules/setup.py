"""`setup-script` and `engine-patch`: scripts that are gone, and changes made to the engine.

A recipe that patches the engine measures another engine than its image names, and one that names a
removed script does not start. A script that only installs things is right. Whether a script patches
is read from its text; where the text is not at hand, from its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rankfold.recipe.files import find_script
from rankfold.recipe.finding import Finding, Note, printable
from rankfold.recipe.flags import words
from rankfold.recipe.view import Recipe

RULE = "setup-script"
PATCH = "engine-patch"

UPSTREAM = words(
    """
    vllm-container-deps.sh vllm-container-deps-one-sided.sh install-ai-dynamo.sh
    prefetch-ai-dynamo-wheel.sh install_dynamo_wheel.sh setup_nixl.sh rebuild-deepep.sh
    """
)
"""Scripts that srt-slurm brings along in its own `configs`. None of them patches an engine."""

_ENGINE = r"(?:vllm|sglang|flashinfer|tensorrt_llm|deep_gemm|nixl)"
_INSTALLED = rf"(?:site|dist)-packages/{_ENGINE}\b|/{_ENGINE}/{_ENGINE}/|\b{_ENGINE}\.__file__"
_CHANGES = re.compile(
    r"\bsed\s+(?:-\S+\s+)*-\w*i|\bpatch\s+(?:-\S+\s+)*-p\d|\bgit\s+apply\b|\.write_text\(|\.write\("
    r"|\bopen\([^)]*['\"][wa]\+?['\"]|\b(?:cp|mv|install)\s[^\n]*(?:site|dist)-packages/"
)
_NAMED = re.compile(r"(?:^|[-_.])(?:\w*patch\w*|fix(?:es)?|hotfix(?:es)?|workarounds?)(?=[-_.]|$)")
_MOUNTED = re.compile(rf"(?:{_INSTALLED})", re.IGNORECASE)
MAX_SCRIPT = 1 << 20
"""Bytes of a script that are read."""


def check(recipe: Recipe) -> Iterator[Finding | Note]:
    """Findings about the set-up script and mounts; a note where a script is out of reach."""
    script = recipe.model.setup_script
    if script:
        yield from _script(recipe, script)
    mounts = [f"{host}:{inside}" for host, inside in (recipe.model.container_mounts or {}).items()]
    for index, mount in enumerate(recipe.model.extra_mount or ()):
        if _MOUNTED.search(mount.partition(":")[2]):
            yield _patched(recipe, ("extra_mount", index), f"mounts over the engine: {mount[:120]}")
    for mount in mounts:
        host, _, inside = mount.partition(":")
        if _MOUNTED.search(inside):
            at = ("container_mounts", host)
            yield _patched(recipe, at, f"mounts over the engine: {inside[:120]}")
    if recipe.model.dynamo and recipe.model.dynamo.cargo_patches:
        yield _patched(recipe, ("dynamo", "cargo_patches"), "Dynamo is built from patched crates")


def _script(recipe: Recipe, script: str) -> Iterator[Finding | Note]:
    at = ("setup_script",)
    found = find_script(recipe.source.path, script)
    if found.path is not None:
        line = patching_line(_read(found.path))
        if line:
            yield _patched(recipe, at, f"{script} changes the engine in its line {line}")
    elif script in UPSTREAM:
        return
    elif found.judged:
        yield recipe.source.finding(
            RULE,
            at,
            f"the setup script {script} is not in configs",
            "remove setup_script, or bring the script back",
        )
    elif _NAMED.search(script.lower()):
        yield _patched(recipe, at, f"{script} is named as a patch")
    else:
        place = recipe.source.place(at)
        yield Note(
            path=recipe.source.path,
            line=place.line,
            message=f"the setup script {printable(script[:80])} is not here, so it was not judged",
        )


def _patched(recipe: Recipe, at: tuple[str | int, ...], what: str) -> Finding:
    return recipe.source.finding(
        PATCH,
        at,
        what,
        "use an image that has the change; or allow it with the reason",
    )


def patching_line(text: str) -> int | None:
    """The line of a script that changes an installed engine, 1-based; None if none does.

    A script does so if it names files of an engine and has a command that changes files.
    """
    lines = text.splitlines()
    code = [(n, line) for n, line in enumerate(lines, 1) if not line.lstrip().startswith("#")]
    if not any(_MOUNTED.search(line) for _, line in code):
        return None
    return next((n for n, line in code if _CHANGES.search(line)), None)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_SCRIPT).decode("utf-8", "replace")
    except OSError:
        return ""
