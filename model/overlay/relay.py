"""Aux hidden states on their way to the last stage: what the model runner does between stages.

A stage hands on only what it captured itself. What it received of earlier stages passes it by, in
the model runner, which is vLLM's `PPHandler`; its other duties need CUDA.
"""

from types import SimpleNamespace
from typing import Any

from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu.pp_utils import PPHandler


def relay_aux_hidden_states(
    model: Any, received: IntermediateTensors | None, output: IntermediateTensors
) -> IntermediateTensors:
    """`output` of a stage that is not the last, with the aux hidden states of earlier stages.

    model: the MiniMaxM3SparseForCausalLM, after `set_aux_hidden_state_layers`.
    received: what the stage received; None on the first.
    """
    handler = SimpleNamespace()
    PPHandler.configure_aux_hidden_state_relay(handler, model)
    return PPHandler.relay_aux_hidden_states(handler, received, output)
