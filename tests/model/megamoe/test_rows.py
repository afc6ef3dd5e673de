"""The rows that MegaMoE adds to the tables of replaced names and of rank-local state."""

import importlib
import sys
import types

import pytest
import torch

from model import megamoe, overrides
from model.rank_state import RANK_LOCAL
from sim import RankCache, RankContext, RankLocal, World
from tests.model.megamoe.harness import TABLE, Tokens, build, launch, matrices, rank
from tests.model.test_rank_state import changes, snapshot

CLASS = "vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe:DeepGemmMegaMoEExperts"
WITHOUT_ROWS = tuple(entry for entry in TABLE if entry not in megamoe.RANK_LOCAL)


def test_nothing_is_replaced_where_the_real_kernels_run(
    mega_ready: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[overrides.Override] = []
    monkeypatch.setattr(overrides, "_install", put.extend)
    monkeypatch.setattr(megamoe, "real_deep_gemm", lambda: True)
    platform = importlib.import_module("vllm.platforms").current_platform
    monkeypatch.setattr(platform, "device_type", "cuda", raising=False)
    overrides.install()
    assert put and not set(overrides.MEGAMOE) & set(put)
    # Folded ranks are on the CPU, whatever GPU the machine has.
    monkeypatch.setattr(platform, "device_type", "cpu", raising=False)
    overrides.install()
    assert set(overrides.MEGAMOE) <= set(put)


def test_every_row_is_declared_in_full_and_in_place(mega_ready: None) -> None:
    rows = overrides.MEGAMOE
    assert len({row.target for row in rows}) == len(rows) == 4
    for row in rows:
        assert row.kind in {"leaf kernel", "platform hook"}
        assert len(row.reason) > 20 and "\n" not in row.reason
        # What stands there is ours, and the original is kept.
        assert overrides._read(row.target) is not overrides._originals[row.target]
        assert not row.target.startswith(CLASS.split(":")[0])


def test_the_platform_claims_sm100_to_those_who_ask_for_that_family_alone(
    mega_ready: None,
) -> None:
    platform = importlib.import_module("vllm.platforms").current_platform
    assert platform.is_device_capability_family(100)
    assert not platform.is_device_capability_family(90)
    assert not platform.has_device_capability(90)
    assert not platform.is_device_capability((10, 0))
    assert platform.get_device_capability() is None


@pytest.mark.parametrize(
    ("gpu", "capability", "names", "real"),
    [
        (False, (10, 0), ["bf16_mega_moe"], False),
        (True, (9, 0), ["bf16_mega_moe"], False),
        (True, (10, 3), [], False),
        (True, (10, 0), ["bf16_mega_moe"], True),
    ],
)
def test_the_real_kernels_need_an_sm100_gpu_and_a_deep_gemm_that_has_them(
    mega_ready: None,
    monkeypatch: pytest.MonkeyPatch,
    gpu: bool,
    capability: tuple[int, int],
    names: list[str],
    real: bool,
) -> None:
    module = types.SimpleNamespace(**dict.fromkeys(names))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(sys.modules["vllm.utils.deep_gemm"], "_import_deep_gemm", lambda: module)
    assert megamoe.real_deep_gemm() is real


def run_world(word: str, form: str, table: tuple[RankLocal | RankCache, ...] = TABLE) -> None:
    tokens = Tokens.random(2, 0)

    def program(ctx: RankContext) -> None:
        with rank(ctx) as config:
            build(ctx, config, form)(tokens.x, tokens.weights, tokens.ids)

    with World(word, rank_local=table) as world:
        world.run(program)


def test_launches_in_worlds_of_other_shapes_change_no_global_outside_the_tables(
    mega_ready: None,
) -> None:
    run_world("tep2", "bf16")
    before = snapshot()
    run_world("tep4", "mxfp8")
    run_world("tep2pp2", "bf16")
    assert changes(before, snapshot()) == []


def test_the_search_finds_what_the_rows_declare(
    mega_ready: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = CLASS.split(":")
    owner = getattr(sys.modules[module], name)
    monkeypatch.setattr(owner, "_symm_buffers", {})
    monkeypatch.setattr(owner, "_synchronized_ep_groups", set())
    before = snapshot()
    run_world("tep2", "bf16", WITHOUT_ROWS)
    found = {place.split("/")[1] for place in changes(before, snapshot())}
    (entry,) = megamoe.RANK_LOCAL
    assert found == set(entry.names)
    assert len(WITHOUT_ROWS) >= len(RANK_LOCAL) - 1


def test_each_rank_has_its_own_buffer(mega_ready: None) -> None:
    """Shared, one rank's staging would overwrite another's, which the outputs would show."""
    tokens = [Tokens.random(3, seed) for seed in range(4)]
    outputs, _ = launch("tep4", "bf16", matrices(), tokens)
    (alone,), _ = launch("tep1", "bf16", matrices(), tokens[:1])
    torch.testing.assert_close(outputs[0], alone, rtol=2**-6, atol=2**-6)
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:])
