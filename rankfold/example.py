"""An example: everything that decides one step, so that it can be drawn, shrunk and replayed."""

from __future__ import annotations

from typing import Annotated, Any

import annotated_types
from pydantic import BaseModel, ConfigDict, Field

from model.batch import Batch
from model.subject import check
from model.tiny import ShapeError
from rankfold.errors import UsageError
from rankfold.options import MOST_TOKENS, Options
from sim import Schedule, Topology

Count = Annotated[int, annotated_types.Ge(0)]


class Example(BaseModel):
    """One step of one topology. Values are checked as far as a field alone can tell; `options`
    checks the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    topology: str
    """Its word, such as "tep2pp2"."""
    layers: str = "dm"
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
        options = Options(
            topology=Topology.parse(self.topology),
            tokens=self.tokens,
            sequences=max(1, min(len(self.seq_lens), self.tokens)),
            seed=self.weights,
            dtype=self.dtype,
            layers=self.layers,
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

    def batch(self) -> Batch:
        """The step's input."""
        return Batch.of(self.token_ids, self.seq_lens)

    def run_schedule(self) -> Schedule:
        """The order in which ranks and messages take their turns."""
        return Schedule(seed=self.schedule, late=self.late)

    def __str__(self) -> str:
        """In one line, what differs from the plain case last."""
        said = f"{self.topology}, {self.tokens} tokens"
        if len(self.seq_lens) > 1:
            said += f" in sequences of {', '.join(map(str, self.seq_lens))}"
        said += f", layers {self.layers}, {self.dtype}"
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
