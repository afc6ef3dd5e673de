"""Stands in for the `deep_gemm` Python module under vLLM's MegaMoE experts.

The names and arguments are those of the module that vLLM 0.33 brings (vllm.third_party.deep_gemm).
A shared expert inside the launch is not offered: the kernels here lack `shared_l1_weights`, from
which vLLM concludes, by its own rule, that the shared expert has to run beside the launch.

A launch is collective over the buffer's group: own tokens in, own tokens out, nothing left to
reduce. Tokens may be none, and may differ in number by rank, but every rank has to launch.
"""

import math
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from model import device
from model.megamoe import exchange, mxfp8
from model.megamoe.experts import Activation, run_experts
from model.megamoe.layout import Weights
from model.megamoe.preconditions import PreconditionError, check_buffer, check_launch

TOKEN_ALIGNMENT = 1920
"""Buffers have room for a multiple of so many tokens: the least common multiple of the kernel's
tile heights (`get_token_alignment_for_mega_moe`)."""

_SCALED = {"bf16xbf16": False, "fp8xfp8": True}
_UNSUPPORTED = (
    "the MegaMoE stand-in computes bf16xbf16 and fp8xfp8 (mxfp8 weights), not {}; "
    "use bf16 or mxfp8 experts"
)
_NO_SHARED = "the MegaMoE stand-in has no shared expert inside the launch; run it beside the launch"


class SymmBuffer:
    """One rank's inputs of a launch, which the staging kernel fills: of the tensors the first n
    rows count, n being the rows of the launch's output.

    On a GPU all ranks see each other's; here a rank's own is enough, since rows are sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        mma_type: str,
    ) -> None:
        if mma_type not in _SCALED:
            raise NotImplementedError(_UNSUPPORTED.format(mma_type))
        self.group = group
        self.ranks = dist.get_world_size(group)
        check_buffer(
            ranks=self.ranks,
            experts=num_experts,
            tokens=num_max_tokens_per_rank,
            top_k=num_topk,
            hidden=hidden,
            intermediate=intermediate_hidden,
        )
        tokens = math.ceil(num_max_tokens_per_rank / TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT
        self.num_experts = num_experts
        self.num_max_tokens_per_rank = tokens
        self.num_topk = num_topk
        self.hidden = hidden
        self.intermediate_hidden = intermediate_hidden
        self.mma_type = mma_type
        self.scaled = _SCALED[mma_type]
        """Whether elements are MXFP8, with scales."""
        element = torch.float8_e4m3fn if self.scaled else torch.bfloat16
        where = device.current()
        self.x = torch.zeros(tokens, hidden, dtype=element, device=where)
        """[tokens, H], bfloat16 or float8_e4m3fn."""
        scales = (tokens, hidden // 128) if self.scaled else (0,)
        kind = torch.int32 if self.scaled else torch.float32
        self.x_sf = torch.zeros(scales, dtype=kind, device=where)
        """int32 [tokens, H / 128], four scale codes in each; empty for bfloat16."""
        self.topk_idx = torch.zeros(tokens, num_topk, dtype=torch.int64, device=where)
        """int64 [tokens, K], global expert ids, -1 for none."""
        self.topk_weights = torch.zeros(tokens, num_topk, dtype=torch.float32, device=where)
        """float32 [tokens, K], routed scaling included."""
        # The real one exchanges addresses here, and waits for its peers.
        dist.barrier(group=group)

    def weight_shape(self, name: str) -> list[int]:
        """[local E, rows, columns] of the "l1" or "l2" weights that go with the buffer."""
        local = self.num_experts // self.ranks
        if name == "l1":
            return [local, 2 * self.intermediate_hidden, self.hidden]
        return [local, self.hidden, self.intermediate_hidden]


def get_symm_buffer_for_mega_moe(
    group: dist.ProcessGroup,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
) -> SymmBuffer:
    """A buffer for launches on `group`; collective, since peers exchange addresses.

    num_experts: over all ranks; num_max_tokens_per_rank: rounded up to `TOKEN_ALIGNMENT`.

    Raises:
        PreconditionError: sizes that the kernel cannot take.
        NotImplementedError: an MMA type, activation or shared expert that is not computed here.
    """
    _check_supported(activation, num_shared_experts)
    return SymmBuffer(
        group,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        mma_type,
    )


def get_block_m_for_mega_moe(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_tokens: int,
    num_topk: int,
    mma_type: str,
) -> NoReturn:
    """The tile height, by which inputs of a shared expert inside the launch are laid out."""
    raise NotImplementedError(_NO_SHARED)


def bf16_mega_moe(
    y: torch.Tensor,
    l1_weights: Weights,
    l2_weights: Weights,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
) -> None:
    """y[t] = sum over slots k of weight[t, k] * expert topk_idx[t, k] (x[t]), of the buffer's rows.

    y: bfloat16 [n, H], of this rank's n tokens; l1_weights: bfloat16 [local E, 2 I, H];
    l2_weights: bfloat16 [local E, H, I], both in the layout of `model.megamoe.layout`;
    cumulative_local_expert_recv_stats: int32 [local E], to which the tokens of each of this rank's
    experts are added. fast_math has no meaning here. For rounding see `model.megamoe.experts`.

    Raises:
        PreconditionError: arguments that the kernel would refuse.
    """
    _launch(
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        cumulative_local_expert_recv_stats,
        _activation(activation, activation_clamp, activation_alpha, activation_beta),
    )


def fp8_fp4_mega_moe(
    y: torch.Tensor,
    l1_weights: Weights,
    l2_weights: Weights,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, mxfp8.BLOCK),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
) -> None:
    """`bf16_mega_moe` for MXFP8: weights and the buffer's x come with scales.

    l1_weights: float8_e4m3fn [local E, 2 I, H] with int32 [local E, 2 I, H / 128]; l2_weights
    likewise [local E, H, I] with [local E, H, I / 128].
    """
    if tuple(recipe) != (1, 1, mxfp8.BLOCK):
        raise PreconditionError(f"recipe {recipe}: scales are of 1 x {mxfp8.BLOCK} blocks")
    _launch(
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        cumulative_local_expert_recv_stats,
        _activation(activation, activation_clamp, activation_alpha, activation_beta),
    )


def _refuse_nvfp4(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Raises NotImplementedError: the NVFP4 API has no stand-in."""
    raise NotImplementedError(_UNSUPPORTED.format("nvfp4"))


NVFP4SymmBuffer = nvfp4_mega_moe = get_block_m_for_nvfp4_mega_moe = _refuse_nvfp4


def _launch(
    y: torch.Tensor,
    l1: Weights,
    l2: Weights,
    buffer: SymmBuffer,
    stats: torch.Tensor | None,
    activation: Activation,
) -> None:
    check_launch(y, l1, l2, buffer, stats)
    tokens, top_k = y.shape[0], buffer.num_topk
    group = buffer.group
    made = exchange.plan(buffer.topk_idx[:tokens], buffer.num_experts, group)
    senders = made.slots // top_k
    weights = buffer.topk_weights[:tokens].view(-1, 1)[made.slots]
    if buffer.scaled:
        columns = (buffer.x[senders], buffer.x_sf[senders], weights)
        elements, packed, weights = exchange.dispatch(columns, made, group)
        x = mxfp8.dequantise(elements, mxfp8.unpack_scales(packed))
    else:
        plain, weights = exchange.dispatch((buffer.x[senders], weights), made, group)
        x = plain.to(torch.float32)
    results = run_experts(x, weights.squeeze(-1), made.local_ids, l1, l2, activation)
    y.copy_(exchange.combine(results, made, (tokens, top_k), group))
    if stats is not None:
        stats += torch.bincount(made.local_ids, minlength=len(stats))


def _activation(name: str, clamp: float | None, alpha: float, beta: float) -> Activation:
    _check_supported(name)
    clamp = math.inf if clamp is None else clamp
    if not clamp >= 0 or not math.isfinite(alpha) or not math.isfinite(beta):
        raise PreconditionError(
            f"activation clamp {clamp}, alpha {alpha}, beta {beta}: the clamp must be 0 or more, "
            "alpha and beta finite"
        )
    return Activation(clamp=clamp, alpha=alpha, beta=beta)


def _check_supported(activation: str, num_shared_experts: int = 0) -> None:
    if activation != "swiglu":
        raise NotImplementedError(
            f"the MegaMoE stand-in computes the activation swiglu, not {activation}"
        )
    if num_shared_experts:
        raise NotImplementedError(_NO_SHARED)
