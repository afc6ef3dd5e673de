"""The examiner: runs examples and judges them, on worlds, models and references that it keeps."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch

from model.batch import Batch
from properties.headline import broken
from rankfold.corpus import Corpus
from rankfold.dp_example import judge_on_dp_ranks
from rankfold.example import Example
from rankfold.judge import Judgement, Related, judge
from rankfold.options import Options
from rankfold.processes import RankProcesses
from rankfold.relate import relate
from rankfold.rig import Kept, Rig, Weights
from rankfold.run import Outcome
from rankfold.serving.check import on
from rankfold.serving.drive import Served, serve
from rankfold.serving.judge import judge_steps
from rankfold.serving.relate import related_steps
from rankfold.truth import Truth, summed_ranks
from sim import SimError


class References:
    """What does not depend on the code under test: checkpoints and references. Examiners may share
    it."""

    def __init__(self, *, most: int = 64) -> None:
        """Keep at most so many of each."""
        self.weights: Weights = Kept(most)
        self._corpora: Kept[Any, Corpus] = Kept(most)

    def truth(self, rig: Rig, options: Options, batch: Batch, outcome: Outcome) -> Truth:
        """What an outcome of the rig has to be."""
        weights = rig.weights(options)
        return self._corpus(options, weights).truth(options, weights, batch, outcome)

    def truths(self, rig: Rig, options: Options, served: Served) -> list[Truth]:
        """What the steps of a run have to be."""
        weights = rig.weights(options)
        return self._corpus(options, weights).truths(options, weights, served)

    def _corpus(self, options: Options, weights: dict[str, torch.Tensor]) -> Corpus:
        topology = options.topology
        key = options.weights_key, topology.dp, summed_ranks(options, topology)
        return self._corpora.of(key, lambda: Corpus.of(options, weights))


class Examiner:
    """Judges one example after another. Known findings are set aside and counted by the caller."""

    def __init__(
        self, references: References | None = None, *, processes: RankProcesses | None = None
    ) -> None:
        """Share what others have made, and run on these processes; folded by default."""
        self._references = references or References()
        self._rig = Rig(weights=self._references.weights, processes=processes)

    def examine(self, example: Example) -> Judgement:
        """Run the example and apply every check.

        Raises:
            UsageError, ShapeError, TopologyError: the example makes no sense.
        """
        options = example.options()
        if example.in_steps:
            return self._in_steps(example, options)
        if example.dp_seqs:
            return self._on_dp_ranks(example, options)
        batch = example.batch()
        relation = None
        if example.relation:
            relation = relate(example.relation, batch, options.tiny.vocab_size)
        schedule = example.run_schedule()
        try:
            outcome = self._rig.step(options, batch, schedule=schedule)
            derived = []
            if relation is not None and outcome.broke is None:
                derived = [
                    self._rig.step(options, each, schedule=schedule) for each in relation.derived
                ]
        except SimError as error:
            return Judgement(checks=[broken(error)], taps=[])
        truth = self._references.truth(self._rig, options, batch, outcome)
        related = []
        if relation is not None and outcome.broke is None:
            # Bounds are of the corpus, so the same for batches of its texts, and for a token
            # changed, which is compared bit by bit.
            bounds = [truth.bounds] * len(derived)
            related = [Related(relation=relation, outcomes=derived, bounds=bounds)]
        return judge(options, outcome, truth, related=related, set_known_aside=True)

    def _on_dp_ranks(self, example: Example, options: Options) -> Judgement:
        def truth_of(of_rank: Options, batch: Batch, outcome: Outcome) -> Truth:
            return self._references.truth(self._rig, of_rank, batch, outcome)

        try:
            return judge_on_dp_ranks(self._rig, example, options, truth_of)
        except SimError as error:
            return Judgement(checks=[broken(error)], taps=[])

    def _in_steps(self, example: Example, options: Options) -> Judgement:
        run = on(self._rig, options, schedule=example.run_schedule())
        try:
            served = serve(run, example.plan(), example.sequences())
            related: list[list[Related]] = []
            if example.relation and served.whole:
                related = related_steps(run, served, options.tiny.vocab_size)
        except SimError as error:
            return Judgement(checks=[broken(error)], taps=[])
        truths = self._references.truths(self._rig, options, served)
        return judge_steps(options, served, truths, related=related, set_known_aside=True)

    def close(self) -> None:
        """End all worlds."""
        self._rig.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
