"""M3Config reads a text_config and names what is wrong with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from reference import M3Config, as_float64
from tests.reference.subject import random_weights, tiny_config


def hf_keys(**changes: Any) -> dict[str, Any]:
    keys = {name: getattr(tiny_config(), name) for name in M3Config.__dataclass_fields__}
    return {name: value for name, value in (keys | changes).items() if value is not None}


def test_round_trip_through_hf_keys() -> None:
    assert M3Config.from_hf(hf_keys()) == tiny_config()


SPARSE = {name for name in M3Config.__dataclass_fields__ if name.startswith("sparse_")}


@pytest.mark.parametrize(
    "key", sorted(set(M3Config.__dataclass_fields__) - {"rotary_dim", "swiglu_beta"} - SPARSE)
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"lacks the key '{key}'"):
        M3Config.from_hf(hf_keys(**{key: None}))


def test_beta_defaults_to_the_one_of_the_definition() -> None:
    assert M3Config.from_hf(hf_keys(swiglu_beta=None)).swiglu_beta == 1.0


@pytest.mark.parametrize(
    ("rotary_dim", "factor", "expected"), [(8, None, 8), (None, 0.5, 8), (8, 0.5, 8), (None, 1, 16)]
)
def test_rotary_dim_from_either_key(
    rotary_dim: int | None, factor: float | None, expected: int
) -> None:
    keys = hf_keys(rotary_dim=rotary_dim, partial_rotary_factor=factor)
    assert M3Config.from_hf(keys).rotary_dim == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_dim": None}, "'rotary_dim' or 'partial_rotary_factor'"),
        ({"rotary_dim": 8, "partial_rotary_factor": 1.0}, "rotary_dim 8 contradicts .* 16"),
        ({"moe_layer_freq": [0, 1]}, "has 2 entries; num_hidden_layers wants 4"),
        ({"moe_layer_freq": [0, 1, 2, 1]}, "0s and 1s only"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
        ({"num_experts_per_tok": 9}, "between 1 and num_local_experts 8"),
    ],
)
def test_contradictions_are_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        M3Config.from_hf(hf_keys(**changes))


def test_weights_are_checked_by_name_and_shape() -> None:
    config = tiny_config("dm")
    weights = random_weights(config)
    name = "layers.1.block_sparse_moe.experts.3.w2.weight"
    lacking = {k: v for k, v in weights.items() if k != name}
    with pytest.raises(ValueError, match=f"'{name}' is missing.*\\(64, 32\\)"):
        as_float64(config, lacking)
    with pytest.raises(ValueError, match=f"'{name}' has shape \\(32, 64\\)"):
        as_float64(config, weights | {name: weights[name].T})
    with pytest.raises(ValueError, match=r"strip the prefix 'model\.'"):
        as_float64(config, weights | {"model.norm.weight": weights["norm.weight"]})
    converted = as_float64(config, weights)
    assert as_float64(config, converted)[name] is converted[name]


def sparse_keys(**changes: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "use_sparse_attention": True,
        "sparse_attention_freq": [0, 1, 1, 0],
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 16,
        "sparse_block_size": 4,
        "sparse_topk_blocks": 3,
        "sparse_init_block": 1,
        "sparse_local_block": 2,
        "sparse_score_type": "max",
    } | changes
    kept = {name: value for name, value in keys.items() if value is not None}
    return hf_keys(sparse_attention_config=kept)


def test_sparse_attention_is_read() -> None:
    config = M3Config.from_hf(sparse_keys())
    assert config.sparse_layers == (1, 2)
    assert (config.sparse_block_size, config.sparse_topk_blocks) == (4, 3)
    assert (config.sparse_init_blocks, config.sparse_local_blocks) == (1, 2)
    config = M3Config.from_hf(sparse_keys(sparse_init_block=None, sparse_local_block=None))
    assert (config.sparse_init_blocks, config.sparse_local_blocks) == (0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sparse_attention": False},
        {"sparse_attention_freq": [0, 0, 0, 0]},
        {"use_sparse_attention": None, "sparse_block_size": None},
    ],
)
def test_no_layer_is_sparse_unless_asked_for(changes: dict[str, Any]) -> None:
    assert M3Config.from_hf(sparse_keys(**changes)).sparse_layers == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_block_size": None}, "lacks the key 'sparse_block_size'"),
        ({"sparse_topk_blocks": None}, "lacks the key 'sparse_topk_blocks'"),
        ({"sparse_attention_freq": None}, "lacks the key 'sparse_attention_freq'"),
        ({"sparse_attention_freq": [1]}, r"4 \(num_hidden_layers\) 0s and 1s, not \[1\]"),
        ({"sparse_attention_freq": [1, 2, 0, 0]}, "0s and 1s, not"),
        ({"sparse_num_index_heads": 2}, "sparse_num_index_heads 2 must be num_key_value_heads 4"),
        ({"sparse_index_dim": 8}, "sparse_index_dim 8 must be head_dim 16"),
        ({"sparse_score_type": "mean"}, "sparse_score_type 'mean' is not known; use 'max'"),
        ({"sparse_block_size": 0}, "sparse_block_size 0 must be at least 1"),
        ({"sparse_topk_blocks": 2}, "sparse_topk_blocks 2 .* the 1 init and 2 local blocks"),
        ({"sparse_init_block": -1}, "the -1 init"),
    ],
)
def test_contradictions_of_sparse_attention_are_one_clear_line(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        M3Config.from_hf(sparse_keys(**changes))


def test_sparse_layers_must_be_layers() -> None:
    for layers in ((2, 1), (4,), (1, 1)):
        with pytest.raises(ValueError, match=r"must ascend within 0\.\.3"):
            dataclasses.replace(tiny_config(), sparse_layers=layers)
