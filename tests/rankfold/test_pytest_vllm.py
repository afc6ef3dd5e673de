"""The fixture `vllm_world`: the README's test and the examples pass, and wrong twins are told.

One process runs them all, in a folder without this project's settings: importing vLLM's model code
costs seconds.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.rankfold.pytest_runs import PLUGIN, ROOT, Run, run_pytest

pytestmark = pytest.mark.slow
README = (ROOT / "README.md").read_text()
SECTION = README.split("## In your own tests\n")[1].split("\n## ")[0]
EXAMPLES = sorted((ROOT / "examples" / "pytest").glob("test_*.py"))

MORE = """
import pytest
import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from rankfold.testing import assert_ledger, assert_placed, assert_same, load

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))


def test_merged(vllm_world):
    gate, up = X[:4].clone(), -X[:4]

    def program(ctx):
        layer = MergedColumnParallelLinear(16, [4, 4], bias=False, return_bias=False)
        return load(layer, weight={0: gate, 1: up})(X).chunk(2, -1)

    parts = vllm_world("tp2").run(program)
    for i, weight in enumerate([gate, up]):
        truth = X.double() @ weight.double().T
        assert_placed([part[i] for part in parts], truth, "Shard(features, tp)", terms=16)


def send(ctx, x):
    pp = get_pp_group()
    if pp.is_first_rank:
        pp.send_tensor_dict({"x": x(ctx)}, all_gather_group=get_tp_group())
        return None
    return pp.recv_tensor_dict(all_gather_group=get_tp_group())["x"]


def test_send(vllm_world):
    world = vllm_world("tp2pp2")
    y = world.run(send, lambda ctx: X)
    assert_placed(y, X, "Replicate", topology="tp2pp2", bound=0)
    assert_same(y, topology="tp2pp2")
    # vLLM sends CPU tensors as it sends what describes them: its length, itself, the tensor.
    assert_ledger(world, group="pp.cpu", ranks=[0, 1], send=3)
    assert_ledger(world, group="pp.cpu", ranks=[2, 3], order=["recv"] * 3)
    assert_ledger(world, group="tp", ranks=[2, 3], all_gather_into_tensor=1)


def test_send_of_what_differs(vllm_world):
    y = vllm_world("tp2pp2", sanitizer=False).run(send, lambda ctx: X + ctx.rank)
    assert_placed(y, X, "Replicate", topology="tp2pp2", bound=0, name="received")


def test_hang(vllm_world):
    def program(ctx):
        layer = RowParallelLinear(32, 8, bias=False, return_bias=False)
        return layer(X) if ctx.rank else None

    vllm_world("tp2").run(program)


def test_under_the_ranks_configuration(vllm_world):
    def program(ctx):
        config = get_current_vllm_config()
        return config.parallel_config.rank, torch.is_grad_enabled()

    assert vllm_world("tep2pp2").run(program) == [(rank, False) for rank in range(4)]
    assert torch.is_grad_enabled()


def test_a_configuration_of_ones_own(vllm_world):
    from vllm.config import ParallelConfig, VllmConfig

    def configure(ctx):
        parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True)
        return VllmConfig(parallel_config=parallel)

    def program(ctx):
        return get_current_vllm_config().parallel_config.enable_expert_parallel

    assert vllm_world("tp2", configure=configure).run(program) == [True, True]


def test_nothing_is_left_of_another_world(vllm_world):
    world = vllm_world("tp4")
    assert_ledger(world)
    assert world.run(lambda ctx: get_tp_group().world_size) == [4] * 4


def test_data_parallel(vllm_world):
    vllm_world("dp2")
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("user")
    (folder / "pytest.ini").write_text("[pytest]\nrankfold_vllm = true\n")
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    name = code.splitlines()[0].removeprefix("# ")
    (folder / name).write_text(code)
    (folder / "twice").mkdir()
    call = "layer(shards[get_tensor_model_parallel_rank()].contiguous())"
    assert call in code
    twice = code.replace(call, f"tensor_model_parallel_all_reduce({call})")
    more = "from vllm.distributed import tensor_model_parallel_all_reduce, "
    twice = twice.replace("from vllm.distributed import ", more)
    (folder / "twice" / name).write_text(twice.replace("def test_down_proj", "def test_twice"))
    (folder / "test_more.py").write_text(MORE)
    for path in EXAMPLES:
        shutil.copy(path, folder)
    return run_pytest(folder, *PLUGIN, "--strict-config", "--import-mode=importlib")


@pytest.mark.parametrize("topology", ["tp2", "tp4", "tp2pp2"])
def test_the_readmes_test_passes(user: Run, topology: str) -> None:
    assert user.outcome(f"test_down_proj[{topology}]") == "PASSED"


def test_its_wrong_twin_fails_as_the_readme_shows(user: Run) -> None:
    shown = [line for line in SECTION.splitlines() if line.startswith("E  ")]
    said = [_stable(line) for line in user.failure("test_twice[tp2]").splitlines()]
    assert len(shown) == 3
    for line in shown:
        assert _stable(line) in said, "\n".join(said)


def _stable(line: str) -> str:
    """Without the folder, and the line number of vLLM's file, which is another version's."""
    return re.sub(r"(linear\.py:)\d+", r"\1N", line).replace("twice/", "").strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_pass(user: Run, path: Path) -> None:
    tests = re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    assert tests
    for test in tests:
        outcomes = re.findall(rf"{path.name}::{test}(?:\[\S+\])? ([A-Z]+)", user.output)
        assert set(outcomes) == {"PASSED"}, user.output


@pytest.mark.parametrize(
    "test",
    [
        "test_merged",
        "test_send",
        "test_under_the_ranks_configuration",
        "test_a_configuration_of_ones_own",
        "test_nothing_is_left_of_another_world",
    ],
)
def test_right_programs_pass(user: Run, test: str) -> None:
    assert user.outcome(test) == "PASSED", user.output


def test_a_sliced_send_of_what_differs_is_told_by_its_values(user: Run) -> None:
    assert "received is not Replicate: " in user.errors("test_send_of_what_differs")


def test_a_hang_in_a_layer_is_told_at_vllms_line(user: Run) -> None:
    said = user.errors("test_hang")
    assert "Deadlock: deadlock: rank 1 waits for calls that nobody can make any more" in said
    assert re.search(r"rank 1 waits in all_reduce\(sum\) .* at vllm/model_executor/layers/", said)


def test_what_cannot_be_driven_is_one_line(user: Run) -> None:
    said = user.errors("test_data_parallel")
    assert said.endswith("ValueError: dp2: data parallelism is not driven yet; use tp and pp")
