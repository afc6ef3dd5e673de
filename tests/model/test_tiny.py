"""Tiny configurations: what vLLM reads from them, and which topologies they refuse, in one line."""

import json
from pathlib import Path

import pytest

from model.tiny import ShapeError, TinyM3
from sim import Topology


@pytest.mark.parametrize(
    "word",
    [
        "tp1",
        "tp2",
        "tp4",
        "tp8",
        "pp2",
        "pp4",
        "tp2pp2",
        "tep2pp2",
        "tep4pp2",
        "tp2pp4",
        "tep8",
        "tp8pp4",
        "dep16",
    ],
)
def test_the_default_model_can_be_cut(word: str) -> None:
    TinyM3().validate(Topology.parse(word))


@pytest.mark.parametrize(
    ("word", "sizes", "message"),
    [
        ("tp3", {}, "tp3: 8 query heads do not divide by 3; use tp1, tp2, tp4 or tp8"),
        ("tep3", {}, "tp3: 8 query heads do not divide by 3; use tp1, tp2, tp4 or tp8"),
        (
            "pp5",
            {},
            "pp5: 4 layers do not make 5 stages; use pp1, pp2, pp3 or pp4, or more layers",
        ),
        ("pp2", {"layers": "d"}, "pp2: 1 layers do not make 2 stages; use pp1, or more layers"),
        (
            "tp4",
            {"intermediate_size": 6},
            "tp4: 6 shared FFN features do not divide by 4; use tp1 or tp2",
        ),
        (
            "tp4",
            {"intermediate_size": 6, "n_shared_experts": 2},
            "tp4: 6 expert FFN features do not divide by 4; use tp1 or tp2",
        ),
        (
            "tp8",
            {"dense_intermediate_size": 12},
            "tp8: 12 dense FFN features do not divide by 8; use tp1, tp2 or tp4",
        ),
        (
            "tp8",
            {"num_attention_heads": 24, "num_key_value_heads": 3},
            "tp8: 3 key heads neither divide by 8 nor repeat evenly on 8 ranks; use tp1",
        ),
        (
            "tep8",
            {"num_local_experts": 12},
            "ep8: 12 experts do not divide by 8; use ep1, ep2, ep3, ep4, ep6 or ep12",
        ),
        (
            "tp8",
            {"num_local_experts": 4},
            "tp8: more ranks than the 4 experts; use tp1, tp2 or tp4",
        ),
    ],
)
def test_a_topology_that_does_not_fit_is_refused_in_a_line(
    word: str, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ShapeError) as caught:
        TinyM3(**sizes).validate(Topology.parse(word))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": ""}, "layers '': use one letter a layer"),
        ({"layers": "dxm"}, "layers 'dxm': use one letter a layer"),
        ({"num_key_value_heads": 3}, "8 query heads do not divide into 3 groups"),
        ({"rotary_dim": 18}, r"rotary_dim 18 must be even, and 2 to head_dim \(16\)"),
        ({"rotary_dim": 5}, "rotary_dim 5 must be even"),
        ({"num_experts_per_tok": 17}, r"num_experts_per_tok 17 must be 1 to the number of experts"),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_a_line(sizes: dict, message: str) -> None:
    with pytest.raises(ShapeError, match=message) as caught:
        TinyM3(**sizes)
    assert "\n" not in str(caught.value)


def test_vllm_reads_the_sizes_back(vllm_ready: None, tmp_path: Path) -> None:
    from vllm.transformers_utils.config import get_config

    tiny = TinyM3(layers="dmm", routed_scaling_factor=2.5, rope_theta=1234.0)
    directory = tiny.write_config_dir(tmp_path / "config")
    assert json.loads((directory / "config.json").read_text()) == tiny.hf_config()
    text = get_config(directory, trust_remote_code=False).get_text_config()
    for key, value in tiny.text_config().items():
        assert getattr(text, key) == value, key
    assert text.moe_layer_freq == [0, 1, 1]
    assert text.partial_rotary_factor * text.head_dim == tiny.rotary_dim
    assert tiny.moe_layers == (1, 2)
