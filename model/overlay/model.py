"""MiniMax-M3 whose stages keep their stream sharded by token, at every pipeline-parallel size.

Full tensors enter and leave a stage. vLLM's transport between stages relies on it: every TP rank
sends 1/TP of each tensor, and the receiver gathers them.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
import vllm.models.minimax_m3.nvidia.model as minimax_m3
from vllm.models.common.ops.sequence_parallel import sp_shard
from vllm.sequence import IntermediateTensors

from model.megamoe.block import load_fused_shared_experts, mega_moe_expert_mapping
from model.overlay import config
from model.overlay.layers import MiniMaxM3DecoderLayer
from model.overlay.rebind import rebound
from model.overlay.stream import gather_packed, sharded_padding_mask

Output: TypeAlias = torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]


class MiniMaxM3Model(minimax_m3.MiniMaxM3Model):
    """vLLM's backbone; under sequence parallelism its forward pass sees only token shards."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        rebound(super().__init__, MiniMaxM3DecoderLayer=MiniMaxM3DecoderLayer)(
            vllm_config=vllm_config, prefix=prefix
        )
        self.use_sequence_parallel = config.use_sequence_parallel(vllm_config)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Output:
        """As vLLM's: all tokens in, all tokens out, equal on all TP ranks."""
        if not self.use_sequence_parallel:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        if intermediate_tensors is None:
            if inputs_embeds is None:
                inputs_embeds = self.embed_input_ids(input_ids)
            inputs_embeds = self.shard_embedding(inputs_embeds)
        else:
            intermediate_tensors = IntermediateTensors(
                self.shard_on_entry(intermediate_tensors.tensors)
            )
        with sharded_padding_mask(positions):
            output = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

        num_tokens = positions.shape[0]
        if isinstance(output, IntermediateTensors):
            return IntermediateTensors(self.gather_stage_outputs(output.tensors, num_tokens))
        hidden_states, aux = output if isinstance(output, tuple) else (output, [])
        remote = self.collect_remote_aux_hidden_states(intermediate_tensors)
        # The final norm has run on the shard: gathering before it would move as much.
        hidden_states, *local = self.gather_final_outputs(
            [hidden_states, *aux[len(remote) :]], num_tokens
        )
        aux = self.merge_aux(remote, local)
        return (hidden_states, aux) if aux else hidden_states

    def shard_embedding(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, H] of the first stage -> this rank's [ceil(T / TP), H]."""
        return sp_shard(hidden_states)

    def shard_on_entry(self, received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a stage received, with the stream sharded: its two parts add up row by row.

        Aux hidden states of earlier stages only pass through, and stay full.
        """
        stream = ("hidden_states", "residual")
        return {**received, **{name: sp_shard(received[name]) for name in stream}}

    def gather_stage_outputs(
        self, outputs: Mapping[str, torch.Tensor], num_tokens: int
    ) -> dict[str, torch.Tensor]:
        """What a stage hands on: shards [ceil(T / TP), H] -> [T, H], in one exchange."""
        return dict(zip(outputs, gather_packed(list(outputs.values()), num_tokens), strict=True))

    def gather_final_outputs(
        self, outputs: Iterable[torch.Tensor], num_tokens: int
    ) -> list[torch.Tensor]:
        """The last stage's normed hidden states and its own aux hidden states, likewise."""
        return gather_packed(list(outputs), num_tokens)

    def merge_aux(
        self, remote: list[torch.Tensor], local: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Aux hidden states in layer order: those of earlier stages, then this one's."""
        return remote + local

    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
        """(parameter, checkpoint name, expert, shard) of the MegaMoE experts."""
        return mega_moe_expert_mapping(self.config.num_local_experts)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As vLLM's; shared experts that MegaMoE has fused go to it."""
        return super().load_weights(load_fused_shared_experts(self, weights))


class MiniMaxM3SparseForCausalLM(minimax_m3.MiniMaxM3SparseForCausalLM):
    """vLLM's causal language model on the backbone above."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        rebound(super().__init__, MiniMaxM3Model=MiniMaxM3Model)(
            vllm_config=vllm_config, prefix=prefix
        )
