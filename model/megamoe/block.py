"""MiniMax-M3's MoE block on vLLM's MegaMoE experts.

Stands where `MiniMaxM3MoE` does when the MoE backend is deep_gemm_mega_moe, built after
DeepSeek-V4's MegaMoE block. Each rank gives its own tokens and gets their full result: the experts
dispatch and combine by themselves, and the shared expert has replicated weights, so nothing is
left to reduce.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.activation import SiluAndMulWithClamp
from vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe import (
    MEGA_MOE_BF16,
    MEGA_MOE_MXFP8,
    DeepGemmMegaMoEExperts,
    MegaMoEActivation,
    MegaMoEWeightFormat,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.models.minimax_m3.nvidia.model import MiniMaxM3MLP, MiniMaxM3MoE

_FORMATS = {"bf16": MEGA_MOE_BF16, "mxfp8": MEGA_MOE_MXFP8}
# vLLM's configuration for what MiniMax's checkpoints call mxfp8.
_QUANTISATIONS = {"modelopt_mxfp8": "mxfp8"}
# A fused shared expert is loaded under the routed experts' names for its matrices.
_SHARED_SHARDS = {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}


class MiniMaxM3ReplicatedMLP(MiniMaxM3MLP):
    """vLLM's gated MLP with whole weights on every rank: own tokens in, own tokens out."""

    def __init__(
        self,
        config: Any,
        intermediate_size: int,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        # Not MiniMaxM3MLP's: it would shard, and ask for a width that divides.
        nn.Module.__init__(self)
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            disable_tp=True,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            reduce_results=False,
            disable_tp=True,
            prefix=f"{prefix}.down_proj",
        )
        if config.hidden_act != "swigluoai":
            raise ValueError(f"activation {config.hidden_act} is not supported; use swigluoai")
        self.act_fn = SiluAndMulWithClamp(
            swiglu_limit=config.swiglu_limit,
            alpha=config.swiglu_alpha,
            beta=config.swiglu_beta,
        )


class MiniMaxM3MegaMoE(nn.Module):
    """Sigmoid-routed MegaMoE experts with a routing bias, and a shared expert.

    The expert-parallel group is the one that launches: all its ranks call `forward` together,
    those without tokens too.
    """

    def __init__(
        self,
        config: Any,
        layer_id: int,
        quant_config: Any = None,
        reduce_results: bool = True,
        prefix: str = "",
        *,
        vllm_config: Any,
    ) -> None:
        """Takes what `MiniMaxM3MoE` takes, and the whole configuration; there is nothing to
        reduce, so `reduce_results` does not matter.

        Raises ValueError if the experts do not divide over the expert-parallel ranks or the model
        is not in bfloat16, and NotImplementedError for a quantisation that these experts lack.
        """
        super().__init__()
        dtype = vllm_config.model_config.dtype
        if dtype != torch.bfloat16:
            raise ValueError(f"MegaMoE returns bfloat16, so the model cannot be in {dtype}")
        ep = get_ep_group()
        experts = config.num_local_experts
        if experts % ep.world_size:
            raise ValueError(
                f"{experts} experts do not divide over {ep.world_size} expert-parallel ranks"
            )
        local = experts // ep.world_size
        self.top_k = config.num_experts_per_tok
        self.scoring_func = config.scoring_func
        self.routed_scaling_factor = getattr(config, "routed_scaling_factor", 1.0)

        self.e_score_correction_bias: nn.Parameter | None = None
        if getattr(config, "use_routing_bias", False):
            bias = nn.Parameter(torch.empty(experts, dtype=torch.float32))
            bias.weight_loader = MiniMaxM3MoE.ebias_weight_loader  # type: ignore[attr-defined]
            self.e_score_correction_bias = bias
        self.gate = GateLinear(
            config.hidden_size,
            experts,
            bias=False,
            params_dtype=torch.float32,
            out_dtype=torch.float32,
            prefix=f"{prefix}.gate",
        )
        self.shared_experts: MiniMaxM3ReplicatedMLP | None = None
        if getattr(config, "n_shared_experts", None):
            self.shared_experts = MiniMaxM3ReplicatedMLP(
                config,
                config.intermediate_size * config.n_shared_experts,
                quant_config=quant_config,
                prefix=f"{prefix}.shared_experts",
            )
        self.experts = DeepGemmMegaMoEExperts(
            vllm_config,
            num_experts=experts,
            num_local_experts=local,
            experts_start_idx=ep.rank_in_group * local,
            top_k=self.top_k,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            weight_format=weight_format(config, quant_config, f"{prefix}.experts"),
            activation=MegaMoEActivation(
                "swiglu",
                clamp=float(config.swiglu_limit),
                alpha=config.swiglu_alpha,
                beta=config.swiglu_beta,
            ),
            shared_experts=self.shared_experts,
            prefix=f"{prefix}.experts",
        )
        if self.experts.has_fused_shared_experts:
            self.shared_experts = None

    def forward(
        self, hidden_states: torch.Tensor, is_padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This rank's n tokens through the routed experts and the shared one.

        hidden_states: [n, H]; is_padding: bool [n], rows that are to go to no expert, or None to
        go by the forward context's mask. Returns bfloat16 [n, H], the full value. Rows of padding
        get the shared expert's output alone.
        """
        with _padding(is_padding):
            router_logits, _ = self.gate(hidden_states)
            topk_weights, topk_ids = fused_topk_bias(
                hidden_states=hidden_states,
                gating_output=router_logits,
                scoring_func=self.scoring_func,
                e_score_correction_bias=self.e_score_correction_bias,
                topk=self.top_k,
                renormalize=True,
                indices_type=torch.int64,
                routed_scaling_factor=self.routed_scaling_factor,
            )
            return self.experts(hidden_states, topk_weights, topk_ids, self.shared_experts)


def weight_format(config: Any, quant_config: Any, prefix: str) -> MegaMoEWeightFormat:
    """The format of the experts at `prefix`: as vLLM's quantisation configuration says, or else
    `expert_dtype` of the model's (DeepSeek-V4's name for it), or else bfloat16.

    Raises NotImplementedError for a format other than bf16 and mxfp8.
    """
    name = getattr(config, "expert_dtype", "bf16")
    if quant_config is not None:
        quantisation = quant_config.get_name()
        name = _QUANTISATIONS.get(quantisation, quantisation)
        if quantisation in _QUANTISATIONS and quant_config.is_layer_excluded(prefix):
            name = "bf16"
    if name not in _FORMATS:
        raise NotImplementedError(
            f"MiniMax-M3's MegaMoE experts are bf16 or mxfp8, not {name}; "
            "use such a checkpoint, or another MoE backend"
        )
    return _FORMATS[name]


def mega_moe_expert_mapping(num_experts: int) -> list[tuple[str, str, int, str]]:
    """(parameter, checkpoint name, expert, shard) for a model's `load_weights`."""
    return RoutedExperts.build_expert_params_mapping(
        "w1", "w2", "w3", num_experts, routed_experts_prefix=""
    )


def load_fused_shared_experts(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Load the shared experts that run inside MegaMoE's launch; yields all other weights.

    Such an expert is no module, so the model's own loading would pass over its weights. Names are
    those of `model`, a backbone or a causal language model.
    """
    fused = {
        f"{name}.shared_experts.": module.experts
        for name, module in model.named_modules()
        if isinstance(module, MiniMaxM3MegaMoE) and module.experts.has_fused_shared_experts
    }
    for name, weight in weights:
        head, found, _ = name.partition("shared_experts.")
        experts = fused.get(head + found)
        if experts is None:
            yield name, weight
            continue
        for ours, theirs in _SHARED_SHARDS.items():
            name = name.replace(ours, theirs)
        experts.load_shared_expert_weight(name, weight)


@contextmanager
def _padding(mask: torch.Tensor | None) -> Iterator[None]:
    """Let vLLM's router and experts, which ask the forward context, see `mask` as the padding.

    They slice the context's mask by the number of rows, which is wrong for a shard of the tokens.
    The context has its own mask back afterwards: it is that of the whole batch, and others use it.
    """
    if mask is None:
        yield
        return
    if not is_forward_context_available():
        raise RuntimeError("is_padding is given outside of a forward context; enter one")
    context = get_forward_context()
    before, context.is_padding = context.is_padding, mask
    try:
        yield
    finally:
        context.is_padding = before
