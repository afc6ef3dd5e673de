"""The table of rank-local state is complete: worlds change nothing else that a rank could see.

The search does not trust the table: it looks at every global, class attribute and cache of every
loaded module of vLLM before and after worlds of different shapes.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from model.batch import Batch
from model.checkpoint import checkpoint
from model.rank_state import RANK_LOCAL
from model.subject import Subject
from model.tiny import TinyM3
from sim import RankCache, RankContext, RankLocal, World

# Caches that fill while worlds run, whose results are the same for every rank and world.
SAME_FOR_ALL_RANKS = {
    "vllm.logger:_print_debug_once": "which messages were printed",
    "vllm.logger:_print_info_once": "which messages were printed",
    "vllm.logger:_print_warning_once": "which messages were printed",
    "vllm.utils.import_utils:import_triton_kernels": "which packages are installed",
    "vllm.utils.import_utils:_has_module": "which packages are installed",
    "vllm.utils.import_utils:get_triton_kernels_version": "which packages are installed",
    "vllm.utils.flashinfer:has_flashinfer": "which packages are installed",
    "vllm.utils.platform_utils:is_pin_memory_available": "what the platform can do",
    "vllm.utils.func_utils:_supports_kw": "keyed by a function: which keywords it takes",
    "vllm.config.vllm:default_breakable_cudagraph_architectures": "a constant list of names",
    "vllm.model_executor.models.registry:_try_inspect_model_cls": "keyed by a registered class",
    "vllm.v1.attention.selector:_cached_get_attn_backend": "keyed by what the platform is asked; "
    "it always answers with the same class",
    "vllm.transformers_utils.repo_utils:list_repo_files": "keyed by a model's directory",
    "vllm.transformers_utils.utils:maybe_model_redirect": "keyed by a model's directory",
    "vllm.transformers_utils.config:get_pooling_config": "keyed by a model's directory",
    "vllm.transformers_utils.config:get_sentence_transformer_tokenizer_config": "keyed by a "
    "model's directory",
}


OTHER = TinyM3(layers="mdm", rope_theta=77.0, head_dim=32, vocab_size=128, num_local_experts=8)
"""Differs from the default in whatever a cache could be keyed by."""


def run_world(
    word: str,
    tiny: TinyM3 | None = None,
    dtype: torch.dtype = torch.float32,
    table: tuple[RankLocal | RankCache, ...] = RANK_LOCAL,
) -> None:
    tiny = tiny or TinyM3()
    weights = checkpoint(tiny, 0, dtype)

    def program(ctx: RankContext) -> None:
        Subject(ctx, tiny, weights, dtype).step(Batch.random(8, tiny.vocab_size, seed=0))

    with World(word, rank_local=table) as world:
        world.run(program)


def places() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each loaded vLLM module and each class it defines, with its attributes."""
    for name, module in sorted(sys.modules.items()):
        if module is None or name.split(".")[0] != "vllm":
            continue
        yield name, vars(module)
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                yield f"{name}:{key}", dict(vars(value))


def contents(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: id(item) for key, item in value.items()}
    if isinstance(value, list | set):
        return [id(item) for item in value]
    return None


def snapshot() -> dict[str, tuple[Any, Any]]:
    return {
        f"{place}/{name}": (value, contents(value))
        for place, attributes in places()
        for name, value in list(attributes.items())
        if not name.startswith("__")
    }


def changes(before: dict[str, tuple[Any, Any]], after: dict[str, tuple[Any, Any]]) -> list[str]:
    """Names whose value is another object, or another plain value, or holds other objects."""

    def differs(name: str) -> bool:
        (old, old_contents), (new, new_contents) = before[name], after[name]
        same = old == new if isinstance(new, str | int | float | tuple) else old is new
        return not same or old_contents != new_contents

    return [name for name in after if name not in before or differs(name)]


def test_worlds_of_other_shapes_change_no_global_outside_the_table(vllm_ready: None) -> None:
    # The first world imports and fills what every later world finds alike.
    run_world("tp2pp2")
    run_world("dep2")
    before = snapshot()
    run_world("tep4pp2")
    run_world("pp2", OTHER, torch.bfloat16)
    run_world("tp2", OTHER)
    run_world("dp2tep2", OTHER)
    assert changes(before, snapshot()) == []


@pytest.mark.parametrize(
    ("module", "name", "fresh"),
    [
        ("vllm.v1.worker.workspace", "_manager", lambda: None),
        ("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT", dict),
        ("vllm.model_executor.models.utils", "_model_to_pp_missing_layer_names", dict),
    ],
)
def test_the_search_finds_an_entry_that_the_table_lacks(
    vllm_ready: None,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    name: str,
    fresh: Callable[[], Any],
) -> None:
    run_world("tp2pp2")
    monkeypatch.setattr(sys.modules[module], name, fresh())
    before = snapshot()
    table = tuple(entry for entry in RANK_LOCAL if entry.module != module)
    assert len(table) == len(RANK_LOCAL) - 1
    run_world("pp2", OTHER, torch.bfloat16, table)
    found = changes(before, snapshot())
    assert f"{module}/{name}" in found
    assert {place.split("/")[1] for place in found} == {name}


def test_every_cache_that_fills_is_in_the_table_or_reviewed(vllm_ready: None) -> None:
    run_world("tp2pp2")
    run_world("tep4")
    run_world("dp2tep2")
    listed = {f"{e.module}:{e.name}" for e in RANK_LOCAL if isinstance(e, RankCache)}
    filled = set()
    for place, attributes in places():
        for name, value in list(attributes.items()):
            function = inspect_static(value)
            if type(function).__name__ != "_lru_cache_wrapper":
                continue
            if function.cache_info().currsize and function.__module__ == place.split(":")[0]:
                filled.add(f"{place}:{name}")
    assert filled - listed - SAME_FOR_ALL_RANKS.keys() == set()


def inspect_static(value: Any) -> Any:
    """The function behind a static or class method."""
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def test_entries_name_what_vllm_has() -> None:
    for entry in RANK_LOCAL:
        module, _, cls = entry.module.partition(":")
        owner: Any = importlib.import_module(module)
        owner = getattr(owner, cls) if cls else owner
        names = entry.names if isinstance(entry, RankLocal) else (entry.name,)
        assert any(hasattr(owner, name) for name in names), entry
        assert len(entry.reason) > 20


def test_the_table_lists_every_coordinator_of_vllm(vllm_ready: None) -> None:
    state = importlib.import_module("vllm.distributed.parallel_state")
    (entry,) = [
        e
        for e in RANK_LOCAL
        if isinstance(e, RankLocal) and e.module == "vllm.distributed.parallel_state"
    ]
    annotations = state.__annotations__
    coordinators = {name for name, kind in annotations.items() if "GroupCoordinator" in str(kind)}
    assert coordinators and coordinators <= set(entry.names)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.distributed.parallel_state", "_TP"),
        ("vllm.v1.worker.workspace", "_manager"),
        ("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT"),
        ("vllm.model_executor.models.utils", "_model_to_pp_missing_layer_names"),
    ],
)
def test_ranks_have_each_their_own(vllm_ready: None, module: str, name: str) -> None:
    tiny = TinyM3()
    weights = checkpoint(tiny, 0, torch.float32)

    def program(ctx: RankContext) -> Any:
        Subject(ctx, tiny, weights)
        return getattr(sys.modules[module], name)

    with World("pp2", rank_local=RANK_LOCAL) as world:
        values = world.run(program)
    assert all(values) and values[0] is not values[1]
    assert not getattr(sys.modules[module], name)
