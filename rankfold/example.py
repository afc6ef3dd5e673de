"""An example: everything that decides a run, so that it can be drawn, shrunk and replayed."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Annotated, Any

import annotated_types
from pydantic import BaseModel, ConfigDict, Field

from model.batch import Batch
from model.subject import check
from model.tiny import ShapeError
from rankfold.errors import UsageError
from rankfold.options import MOST_REQUESTS, MOST_TOKENS, Options
from rankfold.relate import RELATIONS
from rankfold.serving.plan import Plan, decode_first, plan_of
from sim import Schedule, Topology

Count = Annotated[int, annotated_types.Ge(0)]


class Example(BaseModel):
    """One step of one topology, or several with KV caches between them. Values are checked as far
    as a field alone can tell; `options` checks the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    topology: str
    """Its word, such as "tep2pp2"."""
    layers: str = "dm"
    attention: str = "dense"
    """"dense", "sparse" or "model"; see `rankfold.options.Options`."""
    dtype: str = "float32"
    moe_backend: str = "auto"
    expert_dtype: str = "bf16"
    sp: str = "auto"
    aux: tuple[Count, ...] = Field(default=(), strict=False)
    weights: Count = 0
    """Seed of the weights."""
    token_ids: tuple[Count, ...] = Field(default=(), strict=False)
    seq_lens: tuple[Count, ...] = Field(default=(0,), strict=False)
    """Tokens of each sequence, in the order of `token_ids`."""
    dp_seqs: tuple[Count, ...] = Field(default=(), strict=False)
    """How many of the sequences each DP rank has; () where there is one DP rank."""
    chunk: Count = 0
    """Most tokens of a sequence that a step brings before its decode steps; 0 is all of them."""
    decode: Count = 0
    """Tokens at the end of each sequence, but never its first, that come one a step."""
    schedule: Count | None = None
    """Seed of the ranks' order; None is the plain order."""
    late: bool = False
    """Whether messages and async collectives are delivered as late as a transport may."""
    relation: str = ""
    """A metamorphic relation to check beside the step, or ""; see `properties.metamorphic`."""

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    def options(self) -> Options:
        """What to run.

        Raises:
            UsageError, ShapeError, TopologyError: the fields make no sense together, in one line.
        """
        if sum(self.seq_lens) != self.tokens:
            raise UsageError(
                f"seq_lens {list(self.seq_lens)} must sum to the {self.tokens} token ids"
            )
        if self.tokens > MOST_TOKENS:
            raise UsageError(f"{self.tokens} tokens: use 0 to {MOST_TOKENS}")
        topology = Topology.parse(self.topology)
        if topology.dp > 1:
            self._check_dp(topology)
        elif self.dp_seqs:
            raise UsageError(f"dp_seqs {list(self.dp_seqs)}: {topology} has one DP rank; use []")
        most = max(self.dp_seqs or [len(self.seq_lens)])
        if most > MOST_REQUESTS:
            raise UsageError(f"{most} sequences: use 1 to {MOST_REQUESTS}")
        self._check_steps()
        options = Options(
            topology=topology,
            tokens=self.tokens,
            dp_tokens=tuple(map(sum, self.lens_by_dp_rank())) if self.dp_seqs else (),
            sequences=1 if self.dp_seqs else max(1, min(len(self.seq_lens), self.tokens)),
            seed=self.weights,
            dtype=self.dtype,
            layers=self.layers,
            attention=self.attention,
            moe_backend=self.moe_backend,
            expert_dtype=self.expert_dtype,
            sp=self.sp,
            aux=self.aux,
        )
        check(options.tiny, options.topology)
        largest = max(self.token_ids, default=0)
        if largest >= options.tiny.vocab_size:
            raise ShapeError(
                f"token id {largest}: the vocabulary has {options.tiny.vocab_size} entries"
            )
        return options

    def _check_dp(self, topology: Topology) -> None:
        if len(self.dp_seqs) != topology.dp or sum(self.dp_seqs) != len(self.seq_lens):
            raise UsageError(
                f"dp_seqs {list(self.dp_seqs)}: give a number for each of the {topology.dp} DP "
                f"ranks of {topology}, {len(self.seq_lens)} sequences in all"
            )
        if self.in_steps:
            raise UsageError(f"chunk and decode: {topology} has DP ranks; use 0, or rankfold check")
        if self.relation and not self.tokens:
            raise UsageError(f"relation {self.relation!r}: there are no tokens to change")
        if self.relation not in ("", RELATIONS[0]):
            raise UsageError(
                f"relation {self.relation!r}: on DP ranks use {RELATIONS[0]!r}, or none"
            )

    def _check_steps(self) -> None:
        if not self.in_steps:
            by_rank = self.lens_by_dp_rank()
            if self.attention != "dense" and any(decode_first(lens) != lens for lens in by_rank):
                raise UsageError(
                    f"seq_lens {list(self.seq_lens)}: with sparse attention use ones of 1 first"
                )
            return
        if not (self.tokens and min(self.seq_lens)):
            raise UsageError("chunk and decode: every sequence needs one token or more")
        if self.relation not in ("", RELATIONS[0]):
            raise UsageError(f"relation {self.relation!r}: in steps use {RELATIONS[0]!r}, or none")

    def batch(self) -> Batch:
        """All tokens in one step."""
        return Batch.of(self.token_ids, self.seq_lens)

    def batches(self) -> tuple[Batch, ...]:
        """Likewise, of each DP rank."""
        made, start = [], 0
        for lens in self.lens_by_dp_rank():
            made.append(Batch.of(self.token_ids[start : start + sum(lens)], lens or (0,)))
            start += sum(lens)
        return tuple(made)

    def lens_by_dp_rank(self) -> list[tuple[int, ...]]:
        """Tokens of each sequence of each DP rank; none where it has no sequence."""
        ends = [0, *accumulate(self.dp_seqs or (len(self.seq_lens),))]
        return [self.seq_lens[a:b] for a, b in pairwise(ends)]

    @property
    def in_steps(self) -> bool:
        """Whether the tokens come in several steps; else all in one."""
        return bool(self.chunk or self.decode)

    def plan(self) -> Plan:
        """The steps, of an example that has several."""
        decode = [min(self.decode, length - 1) for length in self.seq_lens]
        prompts = [length - last for length, last in zip(self.seq_lens, decode, strict=True)]
        return plan_of(prompts, decode, chunk=self.chunk)

    def sequences(self) -> list[tuple[int, ...]]:
        """The token ids of each sequence."""
        ends = [0, *accumulate(self.seq_lens)]
        return [self.token_ids[a:b] for a, b in pairwise(ends)]

    def run_schedule(self) -> Schedule:
        """The order in which ranks and messages take their turns."""
        return Schedule(seed=self.schedule, late=self.late)

    def __str__(self) -> str:
        """In one line, what differs from the plain case last."""
        said = f"{self.topology}, {self.tokens} tokens"
        if self.dp_seqs:
            counts = ", ".join(str(sum(lens)) for lens in self.lens_by_dp_rank())
            said += f" on DP ranks ({counts})"
        if len(self.seq_lens) > 1:
            said += f" in sequences of {', '.join(map(str, self.seq_lens))}"
        said += f", layers {self.layers}, {self.dtype}"
        if self.attention != "dense":
            said += f", attention {self.attention}"
        if self.chunk:
            said += f", chunks of {self.chunk}"
        if self.decode:
            said += f", decode {self.decode}"
        if self.moe_backend != "auto":
            said += f", MegaMoE ({self.expert_dtype}), SP {self.sp}"
        if self.aux:
            said += f", aux {','.join(map(str, self.aux))}"
        if self.schedule is not None:
            said += f", schedule {self.schedule}"
        if self.late:
            said += ", late delivery"
        if self.relation:
            said += f", relation {self.relation}"
        return said

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return self.model_dump(mode="json")
