"""How vLLM comes to run on the folded platform, and that it does so only when asked."""

import subprocess
import sys

import pytest

from model import plugin


def run(code: str) -> str:
    """Run code in a process of its own, and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_entry_point_is_silent_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKFOLD_PLATFORM", raising=False)
    assert plugin.register() is None
    monkeypatch.setenv("RANKFOLD_PLATFORM", "0")
    assert plugin.register() is None
    monkeypatch.setenv("RANKFOLD_PLATFORM", "1")
    assert plugin.register() == "model.platform.FoldedPlatform"


def test_vllm_resolves_the_platform_through_the_entry_point() -> None:
    code = """
import os
os.environ["RANKFOLD_PLATFORM"] = "1"
import vllm.platforms, model.plugin
vllm.platforms.load_plugins_by_group = lambda group: {"rankfold": model.plugin.register}
print(type(vllm.platforms.current_platform).__name__)
"""
    assert run(code) == "FoldedPlatform"


def test_a_whole_run_prints_nothing_and_importing_model_is_light() -> None:
    code = """
import sys
import model, model.batch, model.tiny, model.checkpoint, model.overrides, model.plugin
import model.rank_state, model.subject, model.taps
assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
model.subject.prepare()
from vllm.platforms import current_platform
assert current_platform.is_out_of_tree() and current_platform.device_type == "cpu"
model.plugin.activate()

import torch
from sim import World
tiny = model.tiny.TinyM3()
weights = model.checkpoint.checkpoint(tiny, 0, torch.float32)
batch = model.batch.Batch.random(3, tiny.vocab_size, seed=0)
with World("tep2pp2", rank_local=model.rank_state.RANK_LOCAL) as world:
    world.run(lambda ctx: model.subject.Subject(ctx, tiny, weights).step(batch))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_another_platform_already_chosen_is_told_in_a_line(
    vllm_ready: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.platforms

    monkeypatch.setattr(vllm.platforms, "_current_platform", object())
    with pytest.raises(RuntimeError, match=r"vLLM already runs on object; call model\.plugin"):
        plugin.activate()


def test_the_level_that_the_user_chose_stays() -> None:
    code = """
import os, logging
os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
from model import plugin
plugin._quieten()
print(logging.getLogger("vllm").level == logging.INFO, os.environ["VLLM_LOGGING_LEVEL"])
"""
    assert run(code) == "True INFO"
