"""The predictor of one more token: against a second implementation, and its bounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference import Batch, M3Config, Result, draft, draft_bounds, draft_shapes, expected_shapes
from tests.reference.subject import Subject, random_batch, random_weights, tiny_config

CONFIG = tiny_config("dm", "s.")
ONE = tiny_config("m", "s")
MTP = "mtp.layers.0."


def weights_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return random_weights(CONFIG, seed, dtype, draft_shapes(CONFIG))


def hidden_of(batch: Batch, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(batch.token_ids), 64, generator=generator).to(dtype)


def second(
    weights: dict[str, Tensor], batch: Batch, hidden: Tensor, dtype: torch.dtype, ranks: int = 2
) -> dict[str, Tensor]:
    """The predictor from the parts of the second MiniMax-M3."""
    named = {
        name.replace(f"{MTP}transformer_layer.", "layers.0.").replace(MTP, ""): value
        for name, value in weights.items()
    }
    m = Subject(config=ONE, weights=named, dtype=dtype, ranks=ranks)
    embedded = m.w("embed_tokens.weight")[batch.token_ids]
    embedded[batch.positions == 0] = 0
    both = [m.norm(embedded, "enorm.weight"), m.norm(hidden.to(dtype), "hnorm.weight")]
    eh = F.linear(torch.cat(both, -1), m.w("eh_proj.weight"))
    inner: dict[str, Tensor] = {}
    attn = m.attention(0, m.norm(eh, "layers.0.input_layernorm.weight"), batch, inner)
    residual = eh + attn
    x = m.norm(residual, "layers.0.post_attention_layernorm.weight")
    ffn = m.moe(0, x, inner)
    stream = residual + ffn
    norm = m.norm(stream, "final_layernorm.weight")
    logits = F.linear(norm, m.w("lm_head.weight"))
    taps = {name.removeprefix("layers.0."): tap for name, tap in inner.items()}
    taps |= {"eh": eh, "attn": attn, "residual": residual, "ffn": ffn, "stream": stream}
    taps |= {"norm": norm, "logits": logits, "logprobs": logits.to(m.high).log_softmax(-1)}
    return {f"mtp.{name}": tap for name, tap in taps.items()}


@pytest.mark.parametrize("seq_lens", [(1,), (0, 30, 1), (5, 17)])
def test_agrees_with_a_second_implementation_in_float64(seq_lens: tuple[int, ...]) -> None:
    weights, batch = weights_of(), random_batch(CONFIG, seq_lens)
    hidden = hidden_of(batch)
    taps = draft(CONFIG, weights, batch, hidden).taps
    other = second(weights, batch, hidden, torch.float64)
    assert set(taps) == set(other)
    for name, value in other.items():
        torch.testing.assert_close(taps[name], value, rtol=0, atol=1e-12, msg=name)


def test_shapes_are_the_layers_and_the_entrys_and_what_the_model_shares() -> None:
    shapes, model = draft_shapes(CONFIG), expected_shapes(CONFIG)
    assert shapes[f"{MTP}eh_proj.weight"] == (64, 128)
    assert f"{MTP}transformer_layer.self_attn.index_q_proj.weight" in shapes
    assert f"{MTP}transformer_layer.block_sparse_moe.experts.7.w2.weight" in shapes
    shared = {name: shape for name, shape in shapes.items() if not name.startswith("mtp.")}
    names = ("embed_tokens.weight", "lm_head.weight")
    assert shared == {name: model[name] for name in names}


def changed(before: Result, after: Result, tap: str) -> list[int]:
    differs = before.taps[tap] != after.taps[tap]
    return [int(row) for row in differs.any(-1).nonzero().flatten()]


def test_the_token_at_position_0_does_not_matter_and_every_other_does() -> None:
    weights, batch = weights_of(), random_batch(CONFIG, (4,))
    hidden = hidden_of(batch)
    before = draft(CONFIG, weights, batch, hidden)
    for row in range(4):
        ids = batch.token_ids.clone()
        ids[row] = (ids[row] + 1) % 256
        other = Batch(token_ids=ids, positions=batch.positions, seq_lens=(4,))
        after = draft(CONFIG, weights, other, hidden)
        assert changed(before, after, "mtp.eh") == ([row] if row else [])
        moved = hidden.clone()
        moved[row] += 1
        after = draft(CONFIG, weights, batch, moved)
        assert changed(before, after, "mtp.eh") == [row]


def test_choices_are_followed_or_reported() -> None:
    weights, batch = weights_of(), random_batch(CONFIG, (30,))
    hidden = hidden_of(batch)
    own = draft(CONFIG, weights, batch, hidden)
    experts, blocks = own.taps["mtp.experts_chosen"], own.taps["mtp.blocks_chosen"]
    same = draft(CONFIG, weights, batch, hidden, routing=experts.flip(1), selection=blocks.flip(2))
    assert same.routing_rejected == same.selection_rejected == ()
    assert torch.equal(same.taps["mtp.logprobs"], own.taps["mtp.logprobs"])
    experts, blocks = experts.clone(), blocks.clone()
    experts[3], blocks[20, 1] = 0, 0
    bad = draft(CONFIG, weights, batch, hidden, routing=experts, selection=blocks)
    assert bad.routing_rejected == ((0, 3),)
    assert bad.selection_rejected == ((0, 20),)
    assert torch.equal(bad.taps["mtp.logprobs"], own.taps["mtp.logprobs"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(2))
def test_a_correct_subject_stays_inside_and_a_wrong_one_does_not(
    dtype: torch.dtype, seed: int
) -> None:
    weights, batch = weights_of(seed, dtype), random_batch(CONFIG, (30, 9), seed)
    hidden = hidden_of(batch, seed, dtype)

    def against(taps: dict[str, Tensor]) -> dict[str, float]:
        limits = draft_bounds(
            CONFIG,
            weights,
            batch,
            hidden,
            dtype=dtype,
            ranks=2,
            routing=taps["mtp.experts_chosen"],
            selection=taps["mtp.blocks_chosen"],
        )
        exact = limits.result.taps
        return {
            name: float((tap.double() - exact[name]).abs().max()) / max(limits.taps[name], 1e-30)
            for name, tap in taps.items()
        }

    right = against(second(weights, batch, hidden, dtype))
    assert max(right.values()) < 1 / 3, right
    # The halves of the entry exchanged: [hidden | embedded].
    name = f"{MTP}eh_proj.weight"
    exchanged = weights | {name: weights[name].roll(64, 1)}
    wrong = against(second(exchanged, batch, hidden, dtype))
    assert wrong["mtp.eh"] > 3


def test_what_does_not_fit_is_one_clear_line() -> None:
    weights, batch = weights_of(), random_batch(CONFIG, (4,))
    with pytest.raises(ValueError, match=r"hidden must be floats of shape \(4, 64\)"):
        draft(CONFIG, weights, batch, torch.zeros(3, 64))
    lacking = {name: value for name, value in weights.items() if "eh_proj" not in name}
    with pytest.raises(ValueError, match=r"'mtp\.layers\.0\.eh_proj\.weight' is missing"):
        draft(CONFIG, lacking, batch, hidden_of(batch))
    with pytest.raises(ValueError, match="not part of this model"):
        extra = {"norm.weight": torch.zeros(64)}
        draft(CONFIG, weights | extra, batch, hidden_of(batch))


def test_a_dense_models_predictor_is_sparse_all_the_same() -> None:
    dense = M3Config(**{**vars(CONFIG), "sparse_layers": ()})
    weights, batch = weights_of(), random_batch(CONFIG, (30,))
    taps = draft(dense, weights, batch, hidden_of(batch)).taps
    assert torch.equal(
        taps["mtp.logprobs"], draft(CONFIG, weights, batch, hidden_of(batch)).taps["mtp.logprobs"]
    )
