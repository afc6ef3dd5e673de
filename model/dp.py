"""What data parallelism adds to a step: the rows that every DP rank runs, agreed beforehand.

DP ranks have tokens of their own, but share the experts: in every MoE layer each of them gathers
the others' tokens, so all must know all counts, and all must run every step. A rank without tokens
runs a dummy one. The agreement is vLLM's own (`coordinate_batch_across_dp`).
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from model.batch import Batch
from sim import Topology

DUMMY_ROWS = 1
"""Rows that a rank without tokens runs, as in vLLM's `execute_dummy_batch`."""

# What vLLM's ranks say to each other of their CUDA graphs: they pad to one size where all have one.
_EAGER, _GRAPH = 0, 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """What one rank runs in a step."""

    tokens: int
    """The rank's own tokens, which are the first rows."""
    count: int
    """Rows in all: its tokens and pads, or a dummy row where it has no tokens."""
    across_dp: torch.Tensor | None
    """int32 [dp] on the CPU: the rows of each DP rank; None where DP is 1."""

    @property
    def padding(self) -> torch.Tensor | None:
        """bool [count], True for rows that are no tokens; None if all are."""
        if self.count == self.tokens:
            return None
        return torch.arange(self.count) >= self.tokens


def parallel_config(topology: Topology, rank: int) -> Any:
    """vLLM's ParallelConfig of one rank, as `vllm serve` and its worker would make it."""
    made = importlib.import_module("vllm.config").ParallelConfig(
        tensor_parallel_size=topology.tp,
        pipeline_parallel_size=topology.pp,
        data_parallel_size=topology.dp,
        data_parallel_rank=topology.coordinates(rank)["dp"] if topology.dp > 1 else 0,
        enable_expert_parallel=topology.ep,
    )
    # vLLM counts a worker's rank within its DP rank.
    made.rank = rank % (topology.tp * topology.pp)
    return made


def agree(config: Any, tokens: int, *, idle: bool = True, pad: bool = False) -> Rows:
    """Agree with the other DP ranks on the rows that each runs; all call it, once a step.

    Args:
        config: this rank's VllmConfig.
        tokens: this rank's own tokens; 0 or more.
        idle: whether a rank without tokens runs a dummy row. False lets it run no rows, which is
            harder on the code between.
        pad: whether all ranks pad to the longest, as they do where vLLM replays CUDA graphs.
    """
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1:
        return Rows(tokens=tokens, count=tokens, across_dp=None)
    count = DUMMY_ROWS if idle and not tokens else tokens
    dp_utils = importlib.import_module("vllm.v1.worker.dp_utils")
    _, across, _ = dp_utils.coordinate_batch_across_dp(
        num_tokens_unpadded=count,
        parallel_config=parallel,
        allow_microbatching=False,
        cudagraph_mode=_GRAPH if pad else _EAGER,
    )
    own = int(across[parallel.data_parallel_rank])
    return Rows(tokens=tokens, count=own, across_dp=across)


def dummy_batch(rows: Rows, request: int) -> Batch:
    """What a rank without tokens runs: token 0, as a request that nobody has."""
    return Batch.of([0] * rows.count, [rows.count], requests=[request])


@contextmanager
def forward_context(config: Any, metadata: Any, rows: Rows, **more: Any) -> Iterator[None]:
    """vLLM's forward context for a pass over these rows.

    metadata: attention metadata by layer, or None; more: what else `set_forward_context` takes.
    """
    context = importlib.import_module("vllm.forward_context")
    with context.set_forward_context(
        metadata,
        config,
        num_tokens=rows.count,
        num_tokens_across_dp=rows.across_dp,
        is_padding=rows.padding,
        **more,
    ):
        yield
