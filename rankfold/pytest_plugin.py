"""The pytest plugin: the fixtures `world` and `vllm_world`, and what goes with them.

It comes with every pytest run of an environment that has rankfold, so it stays light: neither
torch nor vLLM is imported before a test asks for a fixture (or the settings ask for vLLM).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rankfold.testing import Allow, WatchedWorld, Worlds

_SETTING = "rankfold_vllm"
_WORLDS: pytest.StashKey[dict[str, Worlds]] = pytest.StashKey()
_RUNNING: pytest.StashKey[pytest.Item] = pytest.StashKey()
_ALLOWED = "rankfold_allowed"
"""The name under which a test's report carries what was allowed, also between xdist's processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option, and the same as a setting."""
    said = "put vLLM on rankfold's CPU platform before any test module imports it"
    parser.getgroup("rankfold").addoption("--rankfold-vllm", action="store_true", help=said)
    parser.addini(_SETTING, said, type="bool", default=False)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Conftest files import vLLM too, so this is the moment."""
    _activate(early_config, early_config.known_args_namespace.rankfold_vllm)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; and activate vLLM where the plugin came by -p, after the conftests."""
    config.addinivalue_line(
        "markers",
        "rankfold_allow(rule, site, reason): a finding of the sanitizer that is right here; site "
        "is file:line or a file",
    )
    config.stash[_WORLDS] = {}
    _activate(config, config.getoption("--rankfold-vllm"))


def _activate(config: pytest.Config, asked: bool) -> None:
    if asked or config.getini(_SETTING):
        from rankfold.testing.vllm_ranks import activate

        if said := activate():
            raise pytest.UsageError(f"rankfold: {said}")


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Worlds:
    """world("tp2pp2", ...) makes a folded world under the sanitizer; it ends with the test.

    Options: `allow`, `sanitizer`, `observers`, and those of `sim.World`. The fixture is of the
    session so that Hypothesis takes it; the worlds are of the test, or of one example.
    """
    from rankfold.testing import WatchedWorld

    return _worlds(request.config, "world", WatchedWorld)


@pytest.fixture(scope="session")
def vllm_world(request: pytest.FixtureRequest) -> Worlds:
    """vllm_world("tp2pp2", ...) makes a world whose ranks are inside vLLM's groups.

    Options: as for `world`, and `configure`, which makes a rank's VllmConfig from its context.
    """
    from rankfold.testing import vllm_ranks

    if said := vllm_ranks.activate():
        pytest.fail(f"rankfold: {said}", pytrace=False)
    return _worlds(request.config, "vllm_world", vllm_ranks.vllm_world)


def _worlds(config: pytest.Config, name: str, make: Callable[..., WatchedWorld]) -> Worlds:
    from rankfold.testing import Worlds

    made = Worlds(make, marked=lambda: _marked(config))
    config.stash[_WORLDS][name] = made
    return made


def _marked(config: pytest.Config) -> list[Allow]:
    """What the running test's `rankfold_allow` markers allow."""
    from rankfold.testing import Allow

    allowed = []
    item = config.stash.get(_RUNNING, None)
    for marker in item.iter_markers("rankfold_allow") if item else ():
        try:
            rule, site, reason = (*marker.args, *marker.kwargs.values())
            allowed.append(Allow(rule=rule, site=site, reason=reason))
        except (TypeError, ValueError) as error:
            pytest.fail(f"rankfold_allow(rule, site, reason): {error}", pytrace=False)
    return allowed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Every test starts without worlds, and ends without."""
    item.config.stash[_RUNNING] = item
    try:
        return (yield)
    finally:
        del item.config.stash[_RUNNING]
        for worlds in item.config.stash[_WORLDS].values():
            worlds.reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Judge what only the end of a test can tell, and report what was allowed."""
    try:
        result = yield
        for worlds in item.config.stash[_WORLDS].values():
            if said := worlds.verdict():
                pytest.fail(said, pytrace=False)
        return result
    finally:
        for worlds in item.config.stash[_WORLDS].values():
            worlds.close()
            for finding in worlds.allowed:
                said = f"{finding.rule} at {finding.site}: {finding.allowed}"
                if (_ALLOWED, said) not in item.user_properties:
                    item.user_properties.append((_ALLOWED, said))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Nothing is allowed silently."""
    lines = dict.fromkeys(
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == _ALLOWED
    )
    for line in lines:
        terminalreporter.write_line(f"rankfold allowed {line}")
