"""A second MiniMax-M3 in plain torch, in any dtype, with simulated ranks and switchable faults.

Written in other words than `reference` (SDPA, complex rotary embedding, every expert on every
token, F.rms_norm), so that agreement in float64 means something; and rounding as a real subject
would: partial sums of each rank stored in `dtype` and added one by one.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reference import Batch, M3Config, expected_shapes
from tests.reference import blocks

FAULTS = (
    "shared expert twice",
    "no routed scaling",
    "two rows swapped",
    "half of an all-reduce missing",
)


def tiny_config(layers: str = "dmmm", sparse: str = "", **changes: object) -> M3Config:
    """layers: a letter each, "d" dense FFN and "m" experts; sparse: "s" sparse attention and "."
    dense, all dense if it is left out."""
    indexer: dict[str, object] = {
        "use_sparse_attention": True,
        "sparse_attention_freq": [int(kind == "s") for kind in sparse],
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 16,
        "sparse_block_size": 4,
        "sparse_topk_blocks": 3,
        "sparse_init_block": 1,
        "sparse_local_block": 1,
    }
    indexer |= {key: changes.pop(key) for key in indexer if key in changes}
    sizes: dict[str, object] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 32,
        "dense_intermediate_size": 128,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.0,
        "use_routing_bias": True,
        "moe_layer_freq": [int(kind == "m") for kind in layers],
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "sparse_attention_config": indexer if sparse else None,
    }
    return M3Config.from_hf(sizes | changes)


def random_weights(
    config: M3Config,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shapes: dict[str, tuple[int, ...]] | None = None,
) -> dict[str, Tensor]:
    """Every term matters: norms and biases are not zero, linear layers keep the scale.

    shapes: of the weights, by name; those of the whole model if left out.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in (shapes or expected_shapes(config)).items():
        if "norm" in name:
            scale = 0.3
        elif name.endswith("e_score_correction_bias"):
            scale = 0.05
        elif name.startswith("embed"):
            scale = 1.0
        else:
            scale = shape[-1] ** -0.5
        value = torch.randn(shape, generator=generator) * scale
        in_float32 = ".gate." in name or name.endswith("e_score_correction_bias")
        weights[name] = value if in_float32 else value.to(dtype)
    return weights


def random_batch(config: M3Config, seq_lens: tuple[int, ...], seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(seq_lens)
    return Batch(
        token_ids=torch.randint(config.vocab_size, (tokens,), generator=generator),
        positions=torch.cat([torch.arange(n) for n in seq_lens]).to(torch.int64),
        seq_lens=seq_lens,
    )


@dataclass(kw_only=True)
class Subject:
    config: M3Config
    weights: dict[str, Tensor]
    dtype: torch.dtype
    ranks: int = 1
    fault: str | None = None

    def __post_init__(self) -> None:
        # Norms, router and softmaxes run in float32, or float64 if everything does.
        self.high = torch.float64 if self.dtype == torch.float64 else torch.float32

    def w(self, name: str) -> Tensor:
        return self.weights[name].to(self.dtype)

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = 1 + self.weights[name].to(self.high)
        y = F.rms_norm(x.to(self.high), weight.shape, weight, self.config.rms_norm_eps)
        return y.to(self.dtype)

    def all_reduce(self, partials: list[Tensor]) -> Tensor:
        return functools.reduce(operator.add, partials)

    def row_parallel(self, x: Tensor, weight: Tensor) -> list[Tensor]:
        xs, ws = x.chunk(self.ranks, -1), weight.chunk(self.ranks, -1)
        return [F.linear(a, b) for a, b in zip(xs, ws, strict=True)]

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.config.rotary_dim // 2
        frequency = 1 / self.config.rope_theta ** (torch.arange(half, dtype=self.high) / half)
        angle = positions.to(self.high)[:, None, None] * frequency
        # Tables are stored in dtype, as vLLM's cos_sin_cache is.
        cos, sin = (f(angle).to(self.dtype).to(self.high) for f in (torch.cos, torch.sin))
        turn = torch.complex(cos, sin)
        wide = x.to(self.high)
        z = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * turn
        return torch.cat([z.real, z.imag, wide[..., 2 * half :]], -1).to(self.dtype)

    def index(self, p: str, name: str, x: Tensor, batch: Batch) -> Tensor:
        """What the indexer keeps, in bfloat16 unless everything is float64: [T, heads, D]."""
        y = F.linear(x, self.w(f"{p}index_{name}_proj.weight"))
        y = self.norm(y.reshape(len(x), -1, self.config.head_dim), f"{p}index_{name}_norm.weight")
        kept = torch.float64 if self.dtype == torch.float64 else torch.bfloat16
        return self.rope(y, batch.positions).to(kept).to(self.high)

    def attention(self, i: int, x: Tensor, batch: Batch, taps: dict[str, Tensor]) -> Tensor:
        p, c = f"layers.{i}.self_attn.", self.config
        q, k, v = (
            F.linear(x, self.w(f"{p}{n}_proj.weight")).reshape(len(x), -1, c.head_dim)
            for n in "qkv"
        )
        q = self.rope(self.norm(q, p + "q_norm.weight"), batch.positions)
        k = self.rope(self.norm(k, p + "k_norm.weight"), batch.positions)
        outs: list[Tensor] = []
        chosen: list[Tensor] = []
        indexed: tuple[Tensor, ...] = ()
        if sparse := i in c.sparse_layers:
            index_q, index_k = (self.index(p, name, x, batch) for name in "qk")
            indexed = (index_q, index_k[:, 0])
        parts = (torch.split(y, list(batch.seq_lens)) for y in (q, k, v, *indexed))
        for qkv in zip(*parts, strict=True):
            if sparse and len(qkv[0]):
                found = blocks.chosen(c, *qkv[3:])
                chosen.append(torch.tensor(found))
                outs.append(blocks.attend(*qkv[:3], found, c.sparse_block_size))
            elif len(qkv[0]):
                a, b, d = (y.transpose(0, 1) for y in qkv)
                y = F.scaled_dot_product_attention(a, b, d, is_causal=True, enable_gqa=True)
                outs.append(y.transpose(0, 1))
        if sparse:
            taps[f"layers.{i}.blocks_chosen"] = torch.cat(chosen)
        mixed = torch.cat(outs).flatten(1)
        partials = self.row_parallel(mixed, self.w(p + "o_proj.weight"))
        if self.fault == "half of an all-reduce missing" and i == 1:
            partials = partials[: self.ranks // 2]
        return self.all_reduce(partials)

    def ffn(self, p: str, names: str, x: Tensor) -> list[Tensor]:
        gate, up, down = (self.w(f"{p}{n}.weight") for n in names.split())
        c = self.config
        g = F.linear(x, gate).to(self.high).clamp(max=c.swiglu_limit)
        u = F.linear(x, up).to(self.high).clamp(-c.swiglu_limit, c.swiglu_limit)
        h = F.silu(g * c.swiglu_alpha) / c.swiglu_alpha * (u + c.swiglu_beta)
        return self.row_parallel(h.to(self.dtype), down)

    def moe(self, i: int, x: Tensor, taps: dict[str, Tensor]) -> Tensor:
        p, c = f"layers.{i}.block_sparse_moe.", self.config
        logits = F.linear(x.to(self.high), self.weights[p + "gate.weight"].to(self.high))
        score = logits.sigmoid()
        bias = self.weights[p + "e_score_correction_bias"].to(self.high)
        chosen = (score + bias).topk(c.num_experts_per_tok).indices.sort().values
        mix = score.gather(1, chosen)
        mix = mix / mix.sum(1, keepdim=True)
        if self.fault != "no routed scaling":
            mix = mix * c.routed_scaling_factor
        table = torch.zeros_like(score).scatter(1, chosen, mix).to(self.dtype)  # [T, E]
        taps[f"layers.{i}.router"], taps[f"layers.{i}.experts_chosen"] = logits, chosen
        sums = [torch.zeros_like(x) for _ in range(self.ranks)]
        for e in range(c.num_local_experts):
            for r, part in enumerate(self.ffn(f"{p}experts.{e}.", "w1 w3 w2", x)):
                sums[r] = sums[r] + table[:, e, None] * part
        for r, part in enumerate(self.ffn(p + "shared_experts.", "gate_proj up_proj down_proj", x)):
            sums[r] = sums[r] + part * (2 if self.fault == "shared expert twice" else 1)
        return self.all_reduce(sums)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        stream = self.w("embed_tokens.weight")[batch.token_ids]
        taps = {"embed": stream}
        for i, is_moe in enumerate(self.config.moe_layer_freq):
            p = f"layers.{i}."
            attn = self.attention(i, self.norm(stream, p + "input_layernorm.weight"), batch, taps)
            residual = stream + attn
            h = self.norm(residual, p + "post_attention_layernorm.weight")
            if is_moe:
                ffn = self.moe(i, h, taps)
            else:
                ffn = self.all_reduce(self.ffn(p + "mlp.", "gate_proj up_proj down_proj", h))
            if self.fault == "two rows swapped" and i == 1:
                ffn = ffn[[1, 0, *range(2, len(ffn))]]
            stream = residual + ffn
            taps |= {p + "attn": attn, p + "residual": residual, p + "ffn": ffn}
            taps[p + "stream"] = stream
        taps["norm"] = self.norm(stream, "norm.weight")
        taps["logits"] = F.linear(taps["norm"], self.w("lm_head.weight"))
        taps["logprobs"] = taps["logits"].to(self.high).log_softmax(-1)
        return taps

    def routing(self, taps: dict[str, Tensor]) -> dict[int, Tensor]:
        return {i: taps[f"layers.{i}.experts_chosen"] for i in self.config.moe_layers}

    def selection(self, taps: dict[str, Tensor]) -> dict[int, Tensor]:
        return {i: taps[f"layers.{i}.blocks_chosen"] for i in self.config.sparse_layers}
