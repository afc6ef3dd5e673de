"""A good recipe and its entry, with one field changed in every way that its kind of value has.

Each change is either told, or it is one of those below, which are harmless or which nothing in the
two files could show. A rule that stops finding things fails here, and so does a list below that is
longer than it has to be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from rankfold.recipe.lint import lint
from tests.rankfold.recipe.mutations import mutants
from tests.rankfold.recipe.recipes import BELOW, GOOD, MASTER, NAME

CHANGED = "(one more|doubled|halved)"

RECIPE: Mapping[str, str] = {
    "name: (one character less|number changed)": "words that are no topology are free",
    "model.path: (one character less|number changed)": "another model: nothing else names it",
    f"health_check.*: ({CHANGED}|removed)": "how long a start may take",
    "dynamo.install: (flipped|removed)": "the image may bring Dynamo along; the default is true",
    "frontend.type: removed": "dynamo is the default",
    "frontend.enable_multiple_frontends: (flipped|removed)": "how many routers serve the same",
    "backend.connector: removed": "nixl is the default, and the flags say the same",
    "backend.*_environment.*: (?!as number).*": "any variable and any text may be meant",
    "resources.gpus_per_node: removed": "4 is the default",
    "resources.gpus_per_decode: removed": "the nodes' GPUs are divided: 16 for one worker",
    "*.tensor-parallel-size: removed": "1 is the default",
    f"*.data-parallel-rpc-port: ({CHANGED}|removed)": "any free port will do",
    f"*.block-size: ({CHANGED}|removed)": "which sizes a backend takes is known to vLLM alone",
    "*.max-model-len: (one more|doubled|removed)": "longer than the requests need",
    f"*.max-num-batched-tokens: ({CHANGED}|removed)": "the size of a batch, above max-num-seqs",
    f"*.max-num-seqs: ({CHANGED}|removed)": "still enough for the load; vLLM has a default",
    f"*.max-cudagraph-capture-size: ({CHANGED}|removed)": "which batches are captured",
    "*.gpu-memory-utilization: removed": "vLLM has a default",
    "*.(trust-remote-code|no-enable-prefix-caching): (flipped|removed)": "a choice",
    "benchmark.type: removed": "manual is the default",
    "benchmark.(isl|osl|concurrencies): removed": "not every benchmark has lengths or points",
    "benchmark.req_rate: (as number|removed)": "seven requests a second; inf is the default",
}
"""Changes of the recipe that are not told, each with the reason."""

ENTRY: Mapping[str, str] = {
    "*.model: (one character less|number changed)": "another model: nothing else names it",
    "*.model-prefix: removed": "only names are made of it",
    "*.runner: (one character less|removed)": "runners are named freely, after the GPU",
    "*.kv-p2p-transfer: removed": "a label of results",
    "*.prefill.tp: halved": "tp: 1, ep: 2 is how older entries write DEP2",
    "*.tp: removed": "ep and dp-attn say the same",
}
"""Changes of the entry that are not told."""


def told(tmp_path: Path, recipe: str, master: str) -> bool:
    """Whether anything is said of a recipe and its entry: a finding, or that it was not judged."""
    folder = tmp_path / "recipes" / BELOW
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(recipe)
    (tmp_path / "master.yaml").write_text(master)
    report = lint([str(tmp_path / "master.yaml"), str(folder / NAME)])
    return bool(report.findings or report.notes)


def pattern(text: str) -> re.Pattern[str]:
    """A line of the lists: a dot is a dot, `*` before or after one is any text."""
    path, _, kinds = text.partition(": ")
    return re.compile(f"{path.replace('.', '[.]').replace('*', '.*')}: {kinds}")


@pytest.mark.slow
@pytest.mark.parametrize("which", ["recipe", "entry"])
def test_each_change_is_told_or_harmless(tmp_path: Path, which: str) -> None:
    good, harmless = (GOOD, RECIPE) if which == "recipe" else (MASTER, ENTRY)
    assert not told(tmp_path, GOOD, MASTER)
    total, untold = 0, []
    for mutant in mutants(good):
        total += 1
        texts = (mutant.text, MASTER) if which == "recipe" else (GOOD, mutant.text)
        if not told(tmp_path, *texts):
            untold.append(mutant.name)
    assert total > 100
    patterns = {text: pattern(text) for text in harmless}
    wrong = [name for name in untold if not any(p.fullmatch(name) for p in patterns.values())]
    assert not wrong, "not told, and not known to be harmless:\n" + "\n".join(wrong)
    unused = [t for t, p in patterns.items() if not any(p.fullmatch(name) for name in untold)]
    assert not unused, "in the list, and told or impossible:\n" + "\n".join(unused)
    assert len(untold) < total / 3, f"{len(untold)} of {total} are untold"


def test_a_mutant_differs_from_the_text_in_one_line() -> None:
    lines = GOOD.splitlines()
    for mutant in mutants(GOOD):
        changed = mutant.text.splitlines()
        if mutant.name.endswith("removed"):
            assert len(changed) == len(lines) - 1
        else:
            differ = [a for a, b in zip(lines, changed, strict=True) if a != b]
            assert len(differ) == 1, mutant.name
