"""The staging of a launch's inputs, through vLLM's own launcher of the kernel."""

import importlib
from typing import Any

import pytest
import torch

from model.megamoe import mxfp8

pytestmark = pytest.mark.usefixtures("mega_ready")

TOKENS, HIDDEN, TOP_K, ROOM = 70, 256, 3, 80


def vllm() -> Any:
    return importlib.import_module("vllm.model_executor.layers.fused_moe.prepare_megamoe")


def stage(form: str, padding: torch.Tensor | None = None, **changes: Any) -> dict[str, Any]:
    """One staging into poisoned buffers; the arguments and the buffers by name."""
    generator = torch.Generator().manual_seed(0)
    element = torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn
    # Views with strides of their own, as a shard of a larger tensor has them.
    wide = torch.randn(TOKENS, 2 * HIDDEN, generator=generator).to(torch.bfloat16)
    given: dict[str, Any] = {
        "hidden_states": wide[:, :HIDDEN],
        "topk_weights": torch.rand(TOP_K, TOKENS, generator=generator).T,
        "topk_ids": torch.randint(16, (TOP_K, TOKENS), generator=generator, dtype=torch.int32).T,
        "x": torch.full((ROOM, HIDDEN), 7.0).to(element)[:TOKENS],
        "x_sf": torch.full((ROOM, HIDDEN // 128), -9, dtype=torch.int32)[:TOKENS],
        "topk_idx_out": torch.full((ROOM, TOP_K), 99)[:TOKENS],
        "topk_weights_out": torch.full((ROOM, TOP_K), 99.0)[:TOKENS],
        "is_padding": padding,
    } | changes
    if form == "bf16":
        given |= {"x_sf": None, "hidden_quant": None}
    vllm().prepare_megamoe_inputs(**given)
    return given


def test_bf16_hidden_states_are_copied() -> None:
    staged = stage("bf16")
    assert torch.equal(staged["x"], staged["hidden_states"])


def test_mxfp8_scales_lie_in_words_of_four_blocks() -> None:
    staged = stage("mxfp8")
    for token in (0, 33, TOKENS - 1):
        row = staged["hidden_states"][token]
        for word in range(HIDDEN // 128):
            packed = int(staged["x_sf"][token, word]) & 0xFFFFFFFF
            for block in range(4):
                columns = slice(128 * word + 32 * block, 128 * word + 32 * block + 32)
                elements, (code,) = mxfp8.quantise(row[columns])
                assert (packed >> (8 * block)) & 0xFF == int(code)
                got = staged["x"][token, columns]
                assert torch.equal(got.view(torch.uint8), elements.view(torch.uint8))


@pytest.mark.parametrize("form", ["bf16", "mxfp8"])
def test_routing_is_repacked_and_padding_is_unrouted(form: str) -> None:
    padding = torch.arange(TOKENS) % 3 == 1
    staged = stage(form, padding)
    ids, weights = staged["topk_idx_out"], staged["topk_weights_out"]
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert torch.equal(ids[~padding], staged["topk_ids"][~padding].to(torch.int64))
    assert torch.equal(weights[~padding], staged["topk_weights"][~padding])
    assert (ids[padding] == -1).all() and not weights[padding].any()


def test_rows_beyond_the_tokens_stay_as_they_are() -> None:
    staged = stage("mxfp8")
    for name, poison in (("x_sf", -9), ("topk_idx_out", 99), ("topk_weights_out", 99.0)):
        beyond = staged[name]._base[TOKENS:]
        assert beyond.shape[0] == ROOM - TOKENS and (beyond == poison).all(), name
    assert (staged["x"]._base[TOKENS:].to(torch.float32) == 7.0).all()


def test_no_tokens_are_nothing_to_do() -> None:
    empty = torch.empty(0, HIDDEN)
    ids = torch.empty(0, TOP_K, dtype=torch.int64)
    vllm().prepare_megamoe_inputs(
        empty, ids.float(), ids, empty, None, ids, ids.float(), hidden_quant=None
    )


def test_vllm_checks_the_arguments_itself() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        stage("bf16", hidden_states=torch.zeros(TOKENS, 100))
    with pytest.raises(ValueError, match="x_sf iff hidden_quant"):
        stage("mxfp8", x_sf=None)


def test_what_is_not_staged_is_one_line() -> None:
    quant = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    key = quant.QuantKey(
        torch.float8_e4m3fn,
        quant.ScaleDesc(torch.float32, False, quant.GroupShape(1, 128)),
        symmetric=True,
    )
    with pytest.raises(NotImplementedError, match="not fp8 with float32 scales of blocks of 128"):
        stage("mxfp8", hidden_quant=key)
    scales = torch.zeros(1280, HIDDEN // 128, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="stages no shared expert"):
        stage("mxfp8", shared_x_sf=scales, shared_block_m=8)
