"""Rounds of steps and hand-overs, until every request is served."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from model.handover.cells import HandOverError
from model.handover.wire import Disturbance
from rankfold.deployment.fleet import Deployment
from rankfold.deployment.handing import Counts, Handing
from rankfold.deployment.lane import Course, Lane
from rankfold.deployment.router import least_loaded
from rankfold.deployment.worker import Worker
from rankfold.options import Options
from rankfold.rig import Rig
from rankfold.run import Progress
from rankfold.serving.request import Request
from rankfold.serving.sampling import Sampling
from sim import Schedule

MOST_ROUNDS_IDLE = 200
"""Rounds in which nothing moves, after which a hand-over counts as lost."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a deployment is asked to do."""

    requests: Sequence[Request]
    sampling: Sampling = field(default_factory=Sampling)
    chunk: int = 0
    """Most prompt tokens of a request in a step; 0 is all of them."""
    disturbance: Disturbance | None = None
    """What goes wrong with hand-overs; None for nothing."""
    schedule: Schedule | None = None
    """Of folded ranks and messages."""
    arriving: int = 6
    """Requests that arrive in a round."""
    fed: Sequence[Sequence[int]] = ()
    """Of each request what is fed, its prompt and what follows; () to feed what is sampled."""


@dataclass(kw_only=True)
class Side:
    """The workers of one kind, and the courses that they ran."""

    name: str
    workers: list[Worker]
    courses: list[Course] = field(default_factory=list)

    @property
    def lanes(self) -> list[tuple[Worker, Lane]]:
        """All lanes, with their workers."""
        return [(worker, lane) for worker in self.workers for lane in worker.lanes]

    def place(self, course: Course) -> tuple[Worker, Lane] | None:
        """Give a course to the least loaded lane; None if there is no room."""
        lane = least_loaded([lane for _, lane in self.lanes])
        if lane is None:
            return None
        lane.take(course)
        self.courses.append(course)
        return next((worker, mine) for worker, mine in self.lanes if mine is lane)


@dataclass(kw_only=True)
class Served:
    """What became of the requests."""

    deployment: Deployment
    load: Load
    prefill: Side | None
    decode: Side
    handing: Handing
    final: dict[int, tuple[Course, Course]]
    """Of each request that was served: the course that prefilled it and the one that decoded it,
    the same where nothing is handed over."""
    stopped: str = ""
    """Why the rounds ended before every request was served, if they did."""
    in_step: bool = False
    """Whether they ended in a step of a worker, whose own checks say why."""

    @property
    def sides(self) -> list[Side]:
        """Both, or the only one."""
        return [side for side in (self.prefill, self.decode) if side is not None]

    @property
    def counts(self) -> Counts:
        """Of hand-overs."""
        return self.handing.counts

    @property
    def whole(self) -> bool:
        """Whether every request was served."""
        return not self.stopped


def options_of(options: Options, deployment: Deployment, side: str) -> Options:
    """The options of the workers of a side."""
    page = 0
    if side == "decode" and options.attention == "dense":
        # Other pages than the prefill side has, as block tables may have.
        page = 2 * options.tiny.sparse_block_size
    return replace(options, topology=deployment.fleets[side].topology, page=page)


class Drive:
    """Serves requests on a deployment."""

    def __init__(
        self,
        rig: Rig,
        options: Options,
        deployment: Deployment,
        load: Load,
        progress: Progress,
        prefix: str = "",
    ) -> None:
        """Make the workers; their worlds begin with the first step.

        prefix: of their names, where two deployments share a rig.
        """
        self._load, self._progress = load, progress
        self._coming = deque(enumerate(load.requests))
        self._waiting: deque[tuple[int, Request]] = deque()
        self._attempts = [0] * len(load.requests)
        self._to_hand: deque[tuple[Course, tuple[Worker, Lane]]] = deque()
        self._left = set(range(len(load.requests)))
        sides = {
            name: Side(
                name=name,
                workers=[
                    Worker(rig, options_of(options, deployment, name), name, number, prefix)
                    for number in range(fleet.workers)
                ],
            )
            for name, fleet in deployment.fleets.items()
        }
        prefill = sides.get("prefill")
        self.served = Served(
            deployment=deployment,
            load=load,
            prefill=prefill,
            decode=sides["decode"] if prefill is not None else sides["worker"],
            handing=Handing(load.disturbance),
            final={},
        )

    def run(self) -> Served:
        """Serve all requests, or as far as they come."""
        served, idle = self.served, 0
        while self._left or served.handing.under_way:
            before = self._state()
            try:
                if not self._round():
                    return served
            except HandOverError as error:
                served.stopped = str(error)
                return served
            idle = idle + 1 if self._state() == before else 0
            if idle > MOST_ROUNDS_IDLE:
                left = ", ".join(map(str, sorted(self._left))) or "none"
                served.stopped = f"requests not served: {left}; {self._why()}"
                return served
        return served

    def _round(self) -> bool:
        """One round; False if a step broke."""
        served = self.served
        first = served.prefill or served.decode
        self._admit(first)
        if not self._step(first):
            return False
        if served.prefill is not None:
            self._prefilled()
            self._hand_over()
            if not self._step(served.decode):
                return False
        self._finish()
        return True

    def _admit(self, side: Side) -> None:
        """Place the requests that wait, those that have just come among them."""
        for _ in range(min(self._load.arriving, len(self._coming))):
            self._waiting.append(self._coming.popleft())
        while self._waiting:
            index, request = self._waiting[0]
            prompt = len(request.prompt)
            goal = request.length if self.served.prefill is None else prompt
            course = self._course(side, index, self._attempts[index], goal)
            if side.place(course) is None:
                return
            self._waiting.popleft()

    def _course(self, side: Side, index: int, attempt: int, goal: int) -> Course:
        prompt = self._load.requests[index].prompt
        fed = self._load.fed[index][:goal] if self._load.fed else prompt
        return Course(
            number=len(side.courses),
            request=index,
            attempt=attempt,
            prompt=len(prompt),
            goal=goal,
            tokens=list(fed),
        )

    def _step(self, side: Side) -> bool:
        for worker in side.workers:
            if worker.idle:
                continue
            load = self._load
            if not worker.step(load.sampling, load.chunk, self._progress, load.schedule):
                self.served.stopped = f"a step of {worker.name} did not come to its end"
                self.served.in_step = True
                return False
        return True

    def _prefilled(self) -> None:
        """Queue what has been prefilled, and begin to hand it over where there is room."""
        side, decode = self.served.prefill, self.served.decode
        assert side is not None
        queued = {id(course) for course, _ in self._to_hand}
        open_ = {id(hand.sender) for hand in self.served.handing.under_way}
        for worker, lane in side.lanes:
            for course in lane.courses:
                if course.done and id(course) not in queued | open_:
                    self._to_hand.append((course, (worker, lane)))
        while self._to_hand:
            sender, source = self._to_hand[0]
            request = self._load.requests[sender.request]
            receiver = self._course(decode, sender.request, sender.attempt, request.length)
            receiver.ready = False
            target = decode.place(receiver)
            if target is None:
                return
            self._to_hand.popleft()
            self.served.handing.open(sender, receiver, source, target)

    def _hand_over(self) -> None:
        ended = self.served.handing.round()
        for hand in ended.given_up:
            index = hand.sender.request
            self._attempts[index] += 1
            self._waiting.append((index, self._load.requests[index]))
        for hand in ended.begun:
            self.served.final[hand.sender.request] = (hand.sender, hand.receiver)

    def _finish(self) -> None:
        """Let go of what is decoded."""
        served = self.served
        for worker, lane in served.decode.lanes:
            for course in lane.courses:
                if course.done and course.ready:
                    worker.free(lane, course)
                    self._left.discard(course.request)
                    if served.prefill is None:
                        served.final[course.request] = (course, course)

    def _state(self) -> tuple[int, ...]:
        """What changes as long as anything moves."""
        served = self.served
        steps = sum(len(w.outcomes) for side in served.sides for w in side.workers)
        counts = served.counts
        waiting = len(self._waiting) + len(self._coming)
        return steps, counts.taken, counts.whole, counts.given_up, waiting

    def _why(self) -> str:
        for hand in self.served.handing.under_way:
            if missing := hand.transfer.missing:
                return f"{len(missing)} pieces did not arrive, the first of them {missing[0]}"
            return f"the sender of {hand.sender} never heard that it had arrived"
        return "nothing runs and nothing is under way"
