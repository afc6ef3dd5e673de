"""The override table is the whole truth about what is replaced, and nothing in it communicates.

The walk over vLLM runs in a process of its own, where nothing was installed before.
"""

import inspect
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from model import overrides

WALK = '''
import importlib, json, sys

from model import overrides, plugin

def walk(root):
    """(place, value) of each attribute of each loaded module under `root`, of the classes those
    define, and of each entry of their dicts."""
    for name, module in sorted(sys.modules.items()):
        if module is None or not (name == root or name.startswith(root + ".")):
            continue
        places = [(f"{name}:", vars(module))]
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                places.append((f"{name}:{key}.", dict(vars(value))))
            elif hasattr(value, "__dict__") and type(value).__module__ == name:
                places.append((f"{name}:{key}.", vars(value)))
        for prefix, attributes in places:
            for key, value in list(attributes.items()):
                if key.startswith("__"):
                    continue
                yield prefix + key, value
                if isinstance(value, dict):
                    for inner, item in list(value.items()):
                        yield f"{prefix}{key}[{inner}]", item

def changed(before, after):
    """Places whose value is another object now; new modules' own places do not count."""
    modules = {place.split(":")[0] for place in before}
    return sorted(
        place
        for place in before.keys() | after.keys()
        if place.split(":")[0] in modules
        and before.get(place, before) is not after.get(place, before)
    )

report = {}
# Snapshots hold the values themselves, so that no id is used twice.
importlib.import_module("vllm.platforms")
importlib.import_module("vllm.platforms.interface")
import torch
before = dict(walk("vllm")) | dict(walk("torch.accelerator"))
plugin.activate()
report["activation"] = changed(before, dict(walk("vllm")) | dict(walk("torch.accelerator")))

# What installing imports, imported first: an import is no replacement.
importlib.import_module("vllm.models.minimax_m3.nvidia.model")
importlib.import_module("model.experts_method")
importlib.import_module("model.attention_backend")
importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
importlib.import_module("vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe")
importlib.import_module("vllm.utils.deep_gemm")
importlib.import_module("model.megamoe.prepare")
flashinfer = {name for name in sys.modules if name.split(".")[0] == "flashinfer"}
before = dict(walk("vllm"))
overrides.install()
installed = dict(walk("vllm"))
report["install"] = changed(before, installed)
report["flashinfer"] = sorted(
    {name for name in sys.modules if name.split(".")[0] == "flashinfer"} - flashinfer
)
from vllm.utils.flashinfer import has_flashinfer
report["has_flashinfer"] = has_flashinfer()
overrides.install()
report["install again"] = changed(installed, dict(walk("vllm")))
platform = sys.modules["vllm.platforms"]._current_platform
overrides.uninstall()
report["uninstall"] = changed(before, dict(walk("vllm")))
report["left in sys.modules"] = sorted(
    {name for name in sys.modules if name.split(".")[0] == "flashinfer"} - flashinfer
)
report["still installed"] = [o.target for o in overrides.installed()]
overrides.install()
report["reinstall"] = [
    place for place in changed(before, dict(walk("vllm"))) if place not in report["install"]
]
print(json.dumps(report))
'''


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What the walk found: lists of places, "module:attribute" or "module:dict[key]"."""
    run = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def targets(table: tuple[overrides.Override, ...], root: str) -> list[str]:
    return sorted(o.target for o in table if o.target.split(":")[0].split(".")[0] == root)


def test_activation_changes_only_what_the_table_says(report: dict[str, Any]) -> None:
    expected = targets(overrides.ACTIVATION, "vllm") + targets(overrides.ACTIVATION, "torch")
    assert report["activation"] == sorted(expected)


def test_install_changes_only_what_the_table_says(report: dict[str, Any]) -> None:
    installed = overrides.KERNELS + overrides.MEGAMOE + overrides.FOLDED
    assert report["install"] == targets(installed, "vllm")


def test_only_the_norms_of_flashinfer_are_supplied(report: dict[str, Any]) -> None:
    supplied = [o.target for o in overrides.TABLE if o.target == "sys:modules[flashinfer.norm]"]
    assert report["flashinfer"] == (["flashinfer.norm"] if supplied else [])
    if supplied:
        assert report["has_flashinfer"] is False
    assert report["left in sys.modules"] == []


def test_install_is_idempotent_and_uninstall_leaves_nothing(report: dict[str, Any]) -> None:
    assert report["install again"] == []
    # Uninstalling also takes the platform back out.
    assert report["uninstall"] == ["vllm.platforms:_current_platform"]
    assert report["still installed"] == []
    assert report["reinstall"] == ["vllm.platforms:_current_platform"]


def test_every_entry_is_declared_in_full() -> None:
    seen = [o.target for o in overrides.TABLE]
    assert len(seen) == len(set(seen))
    for override in overrides.TABLE:
        assert override.kind in {"leaf kernel", "platform hook", "transport"}
        assert len(override.reason) > 20 and "\n" not in override.reason


@pytest.mark.usefixtures("vllm_ready")
def test_nothing_of_minimax_m3_is_replaced_but_what_launches_kernels() -> None:
    assert not [o.target for o in overrides.TABLE if "minimax_m3.nvidia" in o.target]
    of_models = [o for o in overrides.TABLE if o.target.startswith("vllm.models")]
    assert {o.kind for o in of_models} == {"leaf kernel"}
    for one in of_models:
        launcher = overrides._originals[one.target]
        assert launcher.__module__.startswith("vllm.models.minimax_m3.common.ops."), one.target


def test_of_vllm_distributed_only_what_needs_processes_is_replaced() -> None:
    touched = {o.target: o.kind for o in overrides.TABLE if "vllm.distributed" in o.target}
    assert touched == {
        "vllm.distributed.device_communicators.shm_broadcast:"
        "MessageQueue.create_from_process_group": "transport",
        "vllm.distributed.parallel_state:suppress_stdout": "transport",
    }


COMMUNICATES = re.compile(
    r"\b(all_?reduce|all_?gather\w*|reduce_?scatter\w*|all_?to_?all\w*|broadcast\w*|"
    r"i?send\w*|i?recv\w*|barrier|get_(tp|pp|ep|dp|world)_group)\("
)


def test_no_replaced_kernel_or_hook_communicates(vllm_ready: None) -> None:
    originals = overrides._originals
    looked_at = 0
    for override in overrides.installed():
        original = originals[override.target]
        if override.kind == "transport" or not inspect.isroutine(original):
            continue
        source = inspect.getsource(inspect.unwrap(original))
        assert not COMMUNICATES.search(source), override.target
        looked_at += 1
    assert looked_at >= 2
    # The pattern does recognise a line that communicates.
    from vllm.distributed import communication_op

    assert COMMUNICATES.search(inspect.getsource(communication_op))


def test_the_platform_subclasses_override_no_reduction(vllm_ready: None) -> None:
    """What our subclasses of vLLM's MoE classes define is setup and the experts' own GEMMs."""
    from model.experts_method import FoldedExperts, FoldedUnquantizedFusedMoEMethod

    own = {name for name in vars(FoldedUnquantizedFusedMoEMethod) if not name.startswith("_")}
    assert own == {"process_weights_after_loading"}
    for cls in (FoldedExperts, FoldedUnquantizedFusedMoEMethod):
        assert not COMMUNICATES.search(inspect.getsource(cls))


def test_processes_keep_their_message_queues(vllm_ready: None) -> None:
    overrides.uninstall()
    try:
        overrides.install(folded=False)
        assert not {o.target for o in overrides.FOLDED} & {o.target for o in overrides.installed()}
        assert len(overrides.installed()) == len(overrides.TABLE) - len(overrides.FOLDED)
    finally:
        overrides.install()
    assert overrides.installed() == overrides.TABLE
