"""Tiny MiniMax-M3 configurations: the real model's structure in sizes for a laptop."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class ShapeError(ValueError):
    """A configuration that cannot be made or cut so; the message is one line and says what can."""


class Degrees(Protocol):
    """What of a topology decides the shapes: its degrees, and whether experts are spread."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def ep(self) -> bool: ...


ATTENTIONS = ("dense", "sparse", "model")
"""What `TinyM3.attention` may be."""

# vLLM pads the vocabulary to a multiple of this before it shards it.
_VOCAB_PADDING = 64


@dataclass(frozen=True, kw_only=True)
class TinyM3:
    """Sizes of a tiny model; the defaults divide by TP and EP of 1, 2, 4 and 8."""

    layers: str = "dmmm"
    """One letter a layer: d has a dense FFN, m has routed and shared experts."""
    vocab_size: int = 256
    """Token ids."""
    hidden_size: int = 64
    """Width of the residual stream."""
    num_attention_heads: int = 8
    """Query heads."""
    num_key_value_heads: int = 4
    """Key and value heads; TP beyond this replicates them."""
    head_dim: int = 16
    """Features of a head."""
    rotary_dim: int = 8
    """Features of a head that RoPE rotates; fewer than head_dim, as in the real model."""
    rope_theta: float = 10000.0
    """RoPE's base."""
    max_position_embeddings: int = 4096
    """Longest sequence, in tokens."""
    dense_intermediate_size: int = 128
    """FFN width of a dense layer."""
    intermediate_size: int = 32
    """FFN width of an expert; the shared expert's is n_shared_experts times this."""
    num_local_experts: int = 16
    """Routed experts, over all ranks."""
    num_experts_per_tok: int = 4
    """Routed experts that a token uses."""
    n_shared_experts: int = 1
    """Experts that every token uses, fused into one FFN."""
    use_routing_bias: bool = True
    """Whether a per-expert bias takes part in the selection of experts."""
    routed_scaling_factor: float = 2.0
    """Factor of the routed experts' output."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in every norm."""
    swiglu_limit: float = 7.0
    """Clamp of the FFN's gate and up values."""
    swiglu_alpha: float = 1.702
    """Slope of the gate's sigmoid."""
    swiglu_beta: float = 1.0
    """Added to the up value."""
    attention: str = "dense"
    """Which layers choose the blocks that they attend to: none ("dense"), all ("sparse"), or all
    but the first, the real model's pattern ("model")."""
    sparse_block_size: int = 4
    """Tokens of a block, and of a page of the KV caches; 128 in the real model."""
    sparse_topk_blocks: int = 3
    """Blocks that a query of a sparse layer attends to at most."""
    sparse_init_blocks: int = 1
    """First blocks of a sequence that are always among them."""
    sparse_local_blocks: int = 1
    """Last blocks, up to the query's own, that are always among them."""

    mtp_modules: int = 0
    """Predictors of one more token that the checkpoint has."""

    def __post_init__(self) -> None:
        if not self.layers or set(self.layers) - set("dm"):
            raise ShapeError(
                f"layers {self.layers!r}: use one letter a layer, d (dense FFN) or m (experts), "
                "such as dmmm"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ShapeError(
                f"{self.num_attention_heads} query heads do not divide into "
                f"{self.num_key_value_heads} groups; make them a multiple"
            )
        if self.attention not in ATTENTIONS:
            raise ShapeError(f"attention {self.attention!r}: use {', '.join(ATTENTIONS)}")
        if self.sparse_init_blocks + self.sparse_local_blocks > self.sparse_topk_blocks:
            raise ShapeError(
                f"{self.sparse_init_blocks} first and {self.sparse_local_blocks} last blocks are "
                f"more than the {self.sparse_topk_blocks} that a query attends to"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ShapeError(
                f"rotary_dim {self.rotary_dim} must be even, and 2 to head_dim ({self.head_dim})"
            )
        if not 0 < self.num_experts_per_tok <= self.num_local_experts:
            raise ShapeError(
                f"num_experts_per_tok {self.num_experts_per_tok} must be 1 to the number of "
                f"experts ({self.num_local_experts})"
            )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts."""
        return tuple(i for i, letter in enumerate(self.layers) if letter == "m")

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the layers that choose the blocks that they attend to."""
        layers = range(len(self.layers))
        if self.attention == "dense":
            return ()
        return tuple(i for i in layers if i or self.attention == "sparse" or len(self.layers) == 1)

    def text_config(self) -> dict[str, Any]:
        """The text backbone's entries of a Hugging Face config.json."""
        sparse = [int(i in self.sparse_layers) for i in range(len(self.layers))]
        return {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "model_type": "minimax_m3_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "dense_intermediate_size": self.dense_intermediate_size,
            "shared_intermediate_size": self.intermediate_size,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rotary_dim": self.rotary_dim,
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "use_gemma_norm": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "attention_output_gate": False,
            "hidden_act": "swigluoai",
            "swiglu_limit": self.swiglu_limit,
            "swiglu_alpha": self.swiglu_alpha,
            "swiglu_beta": self.swiglu_beta,
            "scoring_func": "sigmoid",
            "num_local_experts": self.num_local_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "n_shared_experts": self.n_shared_experts,
            "use_routing_bias": self.use_routing_bias,
            "routed_scaling_factor": self.routed_scaling_factor,
            "num_mtp_modules": self.mtp_modules,
            "moe_layer_freq": [int(letter == "m") for letter in self.layers],
            "sparse_attention_config": {
                "use_sparse_attention": any(sparse),
                "sparse_index_dim": self.head_dim,
                "sparse_num_index_heads": self.num_key_value_heads,
                "sparse_topk_blocks": self.sparse_topk_blocks,
                "sparse_block_size": self.sparse_block_size,
                "sparse_init_block": self.sparse_init_blocks,
                "sparse_local_block": self.sparse_local_blocks,
                "sparse_score_type": "max",
                "sparse_attention_freq": sparse,
                "sparse_disable_index_value": sparse,
            },
            "tie_word_embeddings": False,
        }

    def hf_config(self) -> dict[str, Any]:
        """A whole config.json, with the text backbone nested as in the published checkpoint."""
        return {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "model_type": "minimax_m3_vl",
            "text_config": self.text_config(),
        }

    def write_config_dir(self, path: Path | str) -> Path:
        """Write config.json into the directory `path`, made if absent; returns the directory."""
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.hf_config(), indent=1))
        return directory

    def validate(self, topology: Degrees) -> None:
        """Raise ShapeError, in one line, if the topology cannot cut this model."""
        tp, pp = topology.tp, topology.pp
        spread = topology.tp * topology.dp
        fits = [degree for degree in range(1, 65) if self._tp_fault(degree, topology) is None]
        fault = self._tp_fault(tp, topology)
        if fault is not None:
            raise ShapeError(f"tp{tp}: {fault}; use {_choices('tp', fits)}")
        if pp > len(self.layers):
            stages = list(range(1, len(self.layers) + 1))
            raise ShapeError(
                f"pp{pp}: {len(self.layers)} layers do not make {pp} stages; "
                f"use {_choices('pp', stages)}, or more layers"
            )
        if not topology.ep and self.moe_layers and self.intermediate_size % spread:
            raise ShapeError(
                f"dp{topology.dp}tp{tp}: {self.intermediate_size} expert FFN features do not "
                f"divide by its {spread} ranks, over which vLLM slices an expert; use fewer, or "
                "expert parallelism (dep, tep)"
            )
        if topology.ep and self.moe_layers and self.num_local_experts % spread:
            divisors = [n for n in range(1, 65) if self.num_local_experts % n == 0]
            raise ShapeError(
                f"ep{spread}: {self.num_local_experts} experts do not divide by {spread}; "
                f"use {_choices('ep', divisors)}"
            )

    def _tp_fault(self, tp: int, topology: Degrees) -> str | None:
        """What does not divide by `tp`, or None."""
        kv_heads = self.num_key_value_heads
        padded = -(-self.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
        sizes = {
            "query heads": self.num_attention_heads,
            "rows of the padded vocabulary": padded,
        }
        if "d" in self.layers:
            sizes["dense FFN features"] = self.dense_intermediate_size
        if "m" in self.layers:
            sizes["shared FFN features"] = self.intermediate_size * self.n_shared_experts
            if not topology.ep:
                sizes["expert FFN features"] = self.intermediate_size
            if tp > self.num_local_experts:
                return f"more ranks than the {self.num_local_experts} experts"
        for what, size in sizes.items():
            if size % tp:
                return f"{size} {what} do not divide by {tp}"
        if kv_heads % tp and tp % kv_heads:
            return f"{kv_heads} key heads neither divide by {tp} nor repeat evenly on {tp} ranks"
        return None


def _choices(axis: str, degrees: list[int]) -> str:
    words = [f"{axis}{degree}" for degree in degrees]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
