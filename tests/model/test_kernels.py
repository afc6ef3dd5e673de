"""Each leaf kernel against its definition, written out in float64 for one element at a time."""

import math

import pytest
import torch

from model.kernels.experts import fused_experts, swiglu_oai
from model.kernels.norm import gemma_fused_add_rmsnorm, gemma_rmsnorm
from model.kernels.paged_attention import insert_kv, paged_attention
from model.kernels.qknorm_rope import fused_minimax_m3_qknorm_rope_kv_insert
from model.kernels.topk_sigmoid import topk_sigmoid

EPS = 1e-6
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# A few roundings of a value of order 1 to 10 in each dtype.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 6e-2,
    torch.float16: 8e-3,
}


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def norm_row(row: list[float], weight: list[float]) -> list[float]:
    rms = math.sqrt(sum(x * x for x in row) / len(row) + EPS)
    return [x / rms * (1 + w) for x, w in zip(row, weight, strict=True)]


def norm_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = [norm_row(row, weight.tolist()) for row in x.reshape(-1, x.shape[-1]).tolist()]
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_rmsnorm(dtype: torch.dtype) -> None:
    x, weight = rand(5, 16, dtype=dtype), rand(16, seed=1, dtype=dtype) * 0.2
    before = x.clone()
    close(gemma_rmsnorm(x, weight, EPS), norm_rows(x.double(), weight.double()), dtype)
    assert torch.equal(x, before)


def test_gemma_rmsnorm_writes_out() -> None:
    x, weight, out = rand(2, 8), rand(8, seed=1), torch.empty(2, 8, dtype=torch.float64)
    assert gemma_rmsnorm(x, weight, EPS, out=out) is out
    close(out, norm_rows(x, weight), torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_norm_works_in_place_on_both(dtype: torch.dtype) -> None:
    x, residual = rand(5, 16, dtype=dtype), rand(5, 16, seed=1, dtype=dtype)
    weight = rand(16, seed=2, dtype=dtype) * 0.2
    total = x.double() + residual.double()
    pointers = x.data_ptr(), residual.data_ptr()
    assert gemma_fused_add_rmsnorm(x, residual, weight, EPS) is None
    assert (x.data_ptr(), residual.data_ptr()) == pointers
    close(residual, total, dtype)
    close(x, norm_rows(total, weight.double()), dtype)


def test_fused_add_norm_sees_the_sum_before_rounding() -> None:
    # In bfloat16 256 + 1 rounds to 256. A norm of the exact sum is off by half an ulp at most.
    rows = 64
    x = torch.tensor([[1.0, 0.0]] * rows, dtype=torch.bfloat16)
    residual = torch.tensor([[256.0, 64.0 + i] for i in range(rows)], dtype=torch.bfloat16)
    exact = norm_rows(x.double() + residual.double(), torch.zeros(2))
    rounded_first = norm_rows((x + residual).double(), torch.zeros(2)).to(torch.bfloat16)
    half_ulp = 2.0 ** (exact.abs().log2().floor() - 8) * 1.001
    gemma_fused_add_rmsnorm(x, residual, torch.zeros(2, dtype=torch.bfloat16), EPS)
    assert ((x.double() - exact).abs() <= half_ulp).all()
    assert ((rounded_first.double() - exact).abs() > half_ulp).any()


def cos_sin(positions: int, rotary_dim: int, theta: float = 100.0) -> torch.Tensor:
    rows = []
    for position in range(positions):
        angles = [position * theta ** (-2 * j / rotary_dim) for j in range(rotary_dim // 2)]
        rows.append([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_qknorm_rope(dtype: torch.dtype) -> None:
    tokens, heads, kv_heads, head_dim, rotary_dim = 3, 4, 2, 8, 4
    half = rotary_dim // 2
    qkv = rand(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    weights = [rand(head_dim, seed=s, dtype=dtype) * 0.2 for s in (1, 2)]
    cache = cos_sin(16, rotary_dim).to(dtype)
    positions = torch.tensor([0, 5, 11])
    expected = qkv.double().clone().view(tokens, heads + 2 * kv_heads, head_dim)
    for t in range(tokens):
        angles = cache[positions[t]].double().tolist()
        cos, sin = angles[:half], angles[half:]
        for head in range(heads + kv_heads):
            weight = weights[head >= heads].double().tolist()
            normed = norm_row(expected[t, head].tolist(), weight)
            rotated = list(normed)
            for j in range(half):
                a, b = normed[j], normed[j + half]
                rotated[j] = a * cos[j] - b * sin[j]
                rotated[j + half] = b * cos[j] + a * sin[j]
            expected[t, head] = torch.tensor(rotated, dtype=torch.float64)
    values = qkv.view(tokens, -1, head_dim)[:, heads + kv_heads :].clone()
    pointer = qkv.data_ptr()
    result = fused_minimax_m3_qknorm_rope_kv_insert(
        qkv,
        *weights,
        cache,
        positions,
        heads,
        kv_heads,
        rotary_dim,
        EPS,
        kv_cache_dtype="auto",
    )
    assert result is None and qkv.data_ptr() == pointer
    close(qkv, expected.view(tokens, -1), dtype)
    assert torch.equal(qkv.view(tokens, -1, head_dim)[:, heads + kv_heads :], values)


def test_qknorm_rope_refuses_what_is_quantised() -> None:
    arguments = (rand(1, 24), rand(8), rand(8), cos_sin(4, 4), torch.tensor([0]), 1, 1, 4, EPS)
    for name, value in [
        ("kv_cache_dtype", "fp8"),
        ("q_fp8_out", rand(1, 8)),
        ("kv_k_scale", rand(1)),
        ("skip_index_branch", True),
    ]:
        with pytest.raises(NotImplementedError, match=f"has no {name}"):
            fused_minimax_m3_qknorm_rope_kv_insert(*arguments, **{name: value})


def route(logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, **options: object):
    tokens = logits.shape[0]
    weights = torch.full((tokens, top_k), math.nan)
    ids = torch.full((tokens, top_k), -7, dtype=torch.int32)
    slots = torch.full((tokens, top_k), -7, dtype=torch.int32)
    topk_sigmoid(weights, ids, slots, logits, e_score_correction_bias=bias, **options)
    return weights, ids, slots


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_topk_sigmoid(renormalize: bool, with_bias: bool) -> None:
    logits = rand(6, 8, dtype=torch.float32)
    bias = rand(8, seed=1, dtype=torch.float32) * 0.3 if with_bias else None
    weights, ids, slots = route(logits, bias, 3, renormalize=renormalize, routed_scaling_factor=2.0)
    for t, row in enumerate(logits.tolist()):
        scores = [1 / (1 + math.exp(-x)) for x in row]
        offsets = bias.tolist() if bias is not None else [0.0] * 8
        selection = [s + b for s, b in zip(scores, offsets, strict=True)]
        best = sorted(range(8), key=lambda e: -selection[e])[:3]
        assert ids[t].tolist() == best
        total = sum(scores[e] for e in best) if renormalize else 1.0
        expected = [scores[e] / total * 2.0 for e in best]
        assert weights[t].tolist() == pytest.approx(expected, rel=1e-5)
        assert slots[t].tolist() == [k * 6 + t for k in range(3)]
    if with_bias:
        assert not torch.equal(ids, route(logits, None, 3)[1])


def test_topk_sigmoid_takes_the_lower_id_on_a_tie() -> None:
    assert route(torch.zeros(2, 8), None, 3)[1].tolist() == [[0, 1, 2]] * 2


def test_topk_sigmoid_marks_padding() -> None:
    weights, ids, _ = route(rand(2, 4).float(), None, 2, is_padding=torch.tensor([False, True]))
    assert ids[1].tolist() == [-1, -1] and weights[1].tolist() == [0.0, 0.0]
    assert (ids[0] >= 0).all() and (weights[0] > 0).all()


def attention_row(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> list[float]:
    scores = [scale * sum(a * b for a, b in zip(q.tolist(), k, strict=True)) for k in keys.tolist()]
    weights = [math.exp(s - max(scores)) for s in scores]
    total = sum(weights)
    return [
        sum(w * v[d] for w, v in zip(weights, values.tolist(), strict=True)) / total
        for d in range(len(values[0]))
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq_lens", [(5,), (2, 3), (1, 0, 4)])
def test_attention_over_whole_sequences(dtype: torch.dtype, seq_lens: tuple[int, ...]) -> None:
    tokens, heads, kv_heads, head_dim = 5, 4, 2, 6
    q = rand(tokens, heads, head_dim, dtype=dtype)
    k = rand(tokens, kv_heads, head_dim, seed=1, dtype=dtype)
    v = rand(tokens, kv_heads, head_dim, seed=2, dtype=dtype)
    out = torch.full_like(q, math.nan)
    cache = torch.full((len(seq_lens), kv_heads, tokens, 2 * head_dim), math.nan, dtype=dtype)
    slots = [page * tokens + at for page, length in enumerate(seq_lens) for at in range(length)]
    insert_kv(k, v, cache, torch.tensor(slots))
    paged_attention(q, cache, torch.arange(len(seq_lens))[:, None], seq_lens, seq_lens, 0.4, out)
    expected = torch.empty(tokens, heads, head_dim, dtype=torch.float64)
    start = 0
    for length in seq_lens:
        for t in range(start, start + length):
            for head in range(heads):
                seen = slice(start, t + 1), head // (heads // kv_heads)
                row = attention_row(q[t, head].double(), k[seen].double(), v[seen].double(), 0.4)
                expected[t, head] = torch.tensor(row, dtype=torch.float64)
        start += length
    close(out, expected, dtype)


LIMIT, ALPHA, BETA = 1.5, 1.702, 1.0


def expert_row(x: list[float], w13: list[list[float]], w2: list[list[float]]) -> list[float]:
    width = len(w13) // 2
    linear = [sum(w * v for w, v in zip(row, x, strict=True)) for row in w13]
    act = []
    for gate, up in zip(linear[:width], linear[width:], strict=True):
        gate, up = min(gate, LIMIT), max(-LIMIT, min(up, LIMIT))
        act.append(gate / (1 + math.exp(-ALPHA * gate)) * (up + BETA))
    return [sum(w * a for w, a in zip(row, act, strict=True)) for row in w2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("local", [None, (1, 3, 4), ()])
def test_fused_experts(dtype: torch.dtype, local: tuple[int, ...] | None) -> None:
    tokens, hidden, width, experts = 4, 6, 4, 5
    x = rand(tokens, hidden, dtype=dtype)
    w13 = (rand(experts, 2 * width, hidden, seed=1) * 0.8).to(dtype)
    w2 = (rand(experts, hidden, width, seed=2) * 0.4).to(dtype)
    ids = torch.tensor([[0, 3], [4, 1], [2, 2], [1, -1]])
    weights = torch.tensor([[0.5, 1.5], [1.0, 0.25], [0.5, 0.5], [2.0, 9.0]])
    here = range(experts) if local is None else local
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t in range(tokens):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if expert in here:
                row = expert_row(
                    x[t].double().tolist(),
                    w13[expert].double().tolist(),
                    w2[expert].double().tolist(),
                )
                expected[t] += weight * torch.tensor(row, dtype=torch.float64)
    expert_map = None
    if local is not None:
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        for slot, expert in enumerate(local):
            expert_map[expert] = slot
        w13, w2 = w13[list(local)], w2[list(local)]
    output = torch.full((tokens, hidden), math.nan, dtype=dtype)
    before = x.clone()
    fused_experts(output, x, w13, w2, weights, ids, expert_map, limit=LIMIT, alpha=ALPHA, beta=BETA)
    close(output, expected, dtype)
    assert torch.equal(x, before)


def test_fused_experts_keeps_a_bad_row_to_itself() -> None:
    x = rand(3, 4)
    x[1] = math.nan
    w13, w2 = rand(2, 6, 4, seed=1), rand(2, 4, 3, seed=2)
    w13[1] = math.nan
    ids, weights = torch.tensor([[0], [0], [1]]), torch.ones(3, 1)
    output = torch.empty_like(x)
    fused_experts(output, x, w13, w2, weights, ids, None, limit=7.0, alpha=ALPHA, beta=BETA)
    assert output.isnan().any(dim=1).tolist() == [False, True, True]


def test_the_clamp_acts_on_both_sides_of_up_and_above_gate() -> None:
    gate = torch.tensor([9.0, -9.0, 1.0, 1.0], dtype=torch.float64)
    up = torch.tensor([1.0, 1.0, 9.0, -9.0], dtype=torch.float64)
    clamped = swiglu_oai(torch.cat((gate, up)), 7.0, ALPHA, BETA)
    free = swiglu_oai(torch.cat((gate, up)), math.inf, ALPHA, BETA)
    assert (clamped != free).tolist() == [True, False, True, True]
    sigmoid = 1 / (1 + math.exp(-ALPHA))
    assert clamped[2].item() == pytest.approx(sigmoid * 8.0)
    assert clamped[3].item() == pytest.approx(sigmoid * -6.0)
