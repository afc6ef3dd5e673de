"""M3Config reads a text_config and names what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from reference import M3Config, as_float64
from tests.reference.subject import random_weights, tiny_config


def hf_keys(**changes: Any) -> dict[str, Any]:
    keys = {name: getattr(tiny_config(), name) for name in M3Config.__dataclass_fields__}
    return {name: value for name, value in (keys | changes).items() if value is not None}


def test_round_trip_through_hf_keys() -> None:
    assert M3Config.from_hf(hf_keys()) == tiny_config()


@pytest.mark.parametrize(
    "key", sorted(set(M3Config.__dataclass_fields__) - {"rotary_dim", "swiglu_beta"})
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
