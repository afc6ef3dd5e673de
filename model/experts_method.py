"""The experts stand-in, inside vLLM's own modular MoE kernel.

vLLM's quantisation method for plain weights selects no experts on an out-of-tree platform. The
subclass here names ours and lets vLLM build its modular kernel around them, so that routing,
prepare, finalize and every reduction stay vLLM's.
"""

from typing import TYPE_CHECKING, Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from model.kernels.experts import fused_experts

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class FoldedExperts(mk.FusedMoEExpertsModular):
    """Expert GEMMs in plain torch; the output is weighted and summed over the K slots."""

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspaces, and an output of [M tokens, K hidden]."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        # `apply` has already weighted and summed.
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """See `model.kernels.experts.fused_experts` for shapes, dtypes and the formula."""
        if apply_router_weight_on_input:
            raise NotImplementedError("router weights on the input are not implemented here")
        quant = self.quant_config
        fused_experts(
            output,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            expert_map,
            limit=quant.gemm1_clamp_limit,
            alpha=quant.gemm1_alpha,
            beta=quant.gemm1_beta,
        )


class FoldedUnquantizedFusedMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's method for plain weights, with `FoldedExperts` where it would find none."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        supported, reason = FoldedExperts.is_supported_config(
            FoldedExperts, moe, None, None, mk.FusedMoEActivationFormat.Standard
        )
        if not supported:
            raise NotImplementedError(f"the experts stand-in does not fit this layer: {reason}")
        self.experts_cls = FoldedExperts

    def process_weights_after_loading(self, layer: "RoutedExperts") -> None:
        super().process_weights_after_loading(layer)
        # vLLM leaves the kernel of an out-of-tree platform to the platform.
        self._init_moe_kernel(layer)
