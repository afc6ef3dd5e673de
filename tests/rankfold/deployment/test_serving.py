"""Deployments that serve the same requests: the same tokens, whatever the workers and the wire."""

from __future__ import annotations

import functools

import pytest
import torch

from model.handover.wire import Disturbance
from rankfold.deployment.check import check_deployment, shared
from rankfold.deployment.drive import Drive, Load, Served
from rankfold.deployment.fleet import Deployment
from rankfold.deployment.load import mixed_load
from rankfold.deployment.report import DeploymentReport
from rankfold.options import MEGA_MOE, Options
from rankfold.ready import ready_rig
from sim import Schedule

BEFORE, AFTER = "3p2d-dep2-dep8", "3p1d-dep2-dep16"


@functools.cache
def report(
    word: str,
    against: str = "",
    *,
    requests: int = 6,
    decode: int = 3,
    attention: str = "model",
    moe_backend: str = "auto",
    layers: str = "dmm",
    disturbed: bool = True,
    chunk: int = 7,
) -> DeploymentReport:
    both = [Deployment.parse(each) for each in (word, against) if each]
    options = shared(
        Options(
            topology=both[0].decode.topology,
            layers=layers,
            attention=attention,
            moe_backend=moe_backend,
        ),
        both,
    )
    load = Load(
        requests=mixed_load(requests, decode, options.tiny, 0),
        chunk=chunk,
        disturbance=Disturbance() if disturbed else None,
    )
    return check_deployment(
        options, both[0], load, lambda text: None, against=both[1] if against else None
    )


@pytest.mark.parametrize("against", [BEFORE, "tp1"])
def test_the_change_of_seed_2_keeps_every_token_of_32_requests(against: str) -> None:
    found = report(AFTER, against, requests=32, decode=6, layers="dmmm")
    assert found.ok, found.headline
    assert found.against is not None and found.against.same_tokens
    assert found.against.max_abs_delta <= found.against.bound < 2e-3
    assert not found.against.near_ties
    lengths = {len(request.prompt) for request in found.requests}
    assert len(found.requests) == 32 and len(lengths) > 10
    assert all(len(request.tokens) > 1 for request in found.requests)
    hands = found.hand_overs
    assert hands is not None and hands.whole == 32
    # The wire did all that it may.
    assert min(hands.given_up, hands.lost, hands.late, hands.repeated, hands.stale) > 0
    # Every DP rank had something to do, and not all the same.
    for fleet in found.fleets.values():
        counts = fleet.requests_by_lane.values()
        assert 0 < min(counts) < max(counts)


@pytest.mark.parametrize(
    ("word", "against", "attention"),
    [
        # KV heads: more ranks than heads on one side; stages that differ; DP with TP.
        ("1p1d-tp2pp2-tep8", "tp1", "model"),
        ("1p1d-tp8-pp3", "tp2", "model"),
        ("2p1d-tp4-dp2tep2", "tep2pp2", "dense"),
        ("1p1d-dep4-tp4", "tp1", "sparse"),
        ("1p2d-pp2-tp2", "dp2", "dense"),
        ("2a-dep2", "tp1", "model"),
    ],
)
def test_degrees_may_differ_between_the_sides(word: str, against: str, attention: str) -> None:
    found = report(word, against, attention=attention)
    assert found.ok, found.headline
    assert found.against is not None and found.against.same_tokens
    assert "metamorphic" in {check.name for check in found.checks}


def test_mega_moe_with_sequence_parallelism() -> None:
    found = report("1p1d-tep2-tep4pp2", moe_backend=MEGA_MOE, requests=4, decode=2)
    assert found.ok, found.headline
    assert found.subject.sequence_parallel and MEGA_MOE in found.subject.moe_backend


def test_a_disturbed_wire_changes_no_token() -> None:
    """Requests meet in other steps, whose sums round in another order; within that all is equal."""
    calm, rough = (report("2p1d-tp2-dep4", disturbed=disturbed) for disturbed in (False, True))
    assert calm.ok and rough.ok
    bound = 2 * next(tap.bound for tap in calm.taps if tap.name == "logprobs")
    for mine, theirs in zip(calm.requests, rough.requests, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=bound)
        assert mine.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=bound)
    assert calm.hand_overs is not None and rough.hand_overs is not None
    assert calm.hand_overs.lost == calm.hand_overs.repeated == calm.hand_overs.given_up == 0
    assert rough.hand_overs.pieces > calm.hand_overs.pieces


@pytest.mark.parametrize("seed", range(4))
def test_other_disturbances_and_schedules(seed: int) -> None:
    served = serve("1p1d-tp2-dep2", Disturbance(seed=seed, restarted=0.4), Schedule(seed=seed))
    assert served.whole, served.stopped
    tokens = [served.final[i][1].sampled for i in range(6)]
    calm = serve("1p1d-tp2-dep2", None, None)
    assert tokens == [calm.final[i][1].sampled for i in range(6)]
    assert any(course.attempt for course in served.decode.courses) or not served.counts.given_up


def test_the_first_token_of_both_sides_is_the_same() -> None:
    """The prefilling side has the logits of the last prompt token too."""
    served = serve("1p1d-tp2-tp4", None, None)
    assert all(mine.sampled == theirs.sampled[:1] for mine, theirs in served.final.values())


def test_nothing_is_left_in_the_caches() -> None:
    deployment = Deployment.parse("1p1d-tp2-tp4")
    options = shared(
        Options(topology=deployment.decode.topology, layers="dm", attention="model"), [deployment]
    )
    with ready_rig(options, lambda text: None, worlds=2) as rig:
        load = Load(
            requests=mixed_load(6, 3, options.tiny, 0), disturbance=Disturbance(restarted=0.5)
        )
        served = Drive(rig, options, deployment, load, lambda text: None).run()
        assert served.whole and served.counts.given_up
        for side in served.sides:
            for worker in side.workers:
                assert all(not lane.courses for lane in worker.lanes)
                assert all(worker.call(_empty))


def _empty(ctx: object, number: int) -> bool:
    caches = ctx.kept[number].caches  # type: ignore[attr-defined]
    return all(
        bool(torch.isnan(caches.read(slot, layer, 0, 32)).all())
        for slot in range(8)
        for layer in caches.specs
    )


@functools.cache
def serve(word: str, disturbance: Disturbance | None, schedule: Schedule | None) -> Served:
    deployment = Deployment.parse(word)
    options = shared(
        Options(topology=deployment.decode.topology, layers="dm", attention="model"), [deployment]
    )
    with ready_rig(options, lambda text: None, worlds=4) as rig:
        load = Load(
            requests=mixed_load(6, 3, options.tiny, 0),
            chunk=5,
            disturbance=disturbance,
            schedule=schedule,
        )
        return Drive(rig, options, deployment, load, lambda text: None).run()
