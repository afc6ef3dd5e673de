"""One step of the subject: what a rank builds for it, from which checkpoint, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from model.checkpoint import checkpoint
from model.megamoe.tiny import MegaTinyM3, quantise_experts
from model.provenance import Numbering
from model.subject import StepResult, Subject
from model.taps import Captured
from properties import Verdict
from properties.sanitizer import Finding
from rankfold.options import Options
from sim import Ledger, RankContext, SimError, Topology, label_group

PLUMBING = (
    "vllm/distributed/",
    "vllm/model_executor/custom_op.py",
    "model/kernels/",
    "model/communicator.py",
)
"""Files that only pass a call on to torch.distributed, and our stand-ins for kernels: what a
report is about lies outside of them."""

Progress = Callable[[str], None]
"""Told what is being done, for a person who waits."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One step of one topology."""

    topology: Topology
    results: list[StepResult]
    ledger: Ledger
    facts: Mapping[str, object]
    broke: SimError | None = None
    """Why the step did not come to its end; the taps are what was recorded until then."""
    findings: Sequence[Finding] | None = ()
    """What the sanitizer found in the step; None if nobody looked at the operands."""
    parameters: Verdict | None = None
    """Whether the model's parameters were loaded where they belong; None if nobody looked."""

    @property
    def captured(self) -> list[Mapping[str, Captured]]:
        """Each rank's taps."""
        return [result.taps for result in self.results]

    def recorded_whole(self, name: str) -> bool:
        """Whether a tap was recorded on some TP group, and on all ranks of each that has it."""
        have = [name in taps for taps in self.captured]
        groups = self.topology.groups["tp"]
        return any(have) and all(len({have[rank] for rank in group}) == 1 for group in groups)

    @property
    def logits(self) -> torch.Tensor:
        """[T, V], of the first rank of the last stage."""
        return next(r.logits for r in self.results if r.logits is not None)

    @property
    def logprobs(self) -> torch.Tensor:
        """[T, V], of the first rank of the last stage."""
        return next(r.logprobs for r in self.results if r.logprobs is not None)


def full_checkpoint(options: Options) -> dict[str, torch.Tensor]:
    """The checkpoint that all ranks load their parts of."""
    weights = checkpoint(options.tiny, options.seed, options.torch_dtype)
    quantised = isinstance(options.tiny, MegaTinyM3) and options.expert_dtype == "mxfp8"
    return quantise_experts(weights) if quantised else weights


def build(
    ctx: RankContext,
    options: Options,
    weights: Mapping[str, torch.Tensor],
    numbering: Numbering | None = None,
) -> Subject:
    """Build this rank's subject and name its groups for reports.

    numbering: of the weights, to find out which of them are loaded where.
    """
    subject = Subject(
        ctx,
        options.tiny,
        weights,
        options.torch_dtype,
        moe_backend=options.moe_backend,
        sequence_parallel=options.sp == "auto",
        aux=options.aux,
        numbering=numbering,
        page=options.page,
    )
    for label, group in subject.labels().items():
        label_group(group, label)
    return subject
