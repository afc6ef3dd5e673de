"""Subjects off the CPU: what a process is told, its platform, and kernels that follow their inputs.

There is no GPU here, so kernels run on the meta device, which has shapes and no values: a tensor
that a kernel makes on the CPU meets one that is not there, and the kernel fails.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model import device
from model.batch import Batch
from model.kernels.experts import fused_experts
from model.kernels.norm import gemma_fused_add_rmsnorm, gemma_rmsnorm
from model.kernels.paged_attention import paged_attention
from model.kernels.topk_sigmoid import topk_sigmoid
from model.megamoe import mxfp8


def there(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that is not on the CPU."""
    return torch.empty(shape, dtype=dtype, device="meta")


def attention() -> None:
    table = there(2, 3, dtype=torch.int32)
    paged_attention(there(5, 4, 8), there(7, 2, 4, 16), table, (9, 2), (3, 2), 1.0, there(5, 4, 8))


def routing() -> None:
    ids, indices = there(5, 2, dtype=torch.int32), there(5, 2, dtype=torch.int32)
    padding = there(5, dtype=torch.bool)
    topk_sigmoid(there(5, 2), ids, indices, there(5, 8), True, there(8), 2.0, padding)


def experts() -> None:
    ids, mapped = there(5, 2, dtype=torch.int64), there(8, dtype=torch.int32)
    w13, w2 = there(4, 12, 16), there(4, 16, 6)
    given = (there(5, 16), there(5, 16), w13, w2, there(5, 2), ids, mapped)
    fused_experts(*given, limit=7.0, alpha=1.7, beta=1.0)


def norms() -> None:
    gemma_rmsnorm(there(5, 16), there(16))
    gemma_fused_add_rmsnorm(there(5, 16), there(5, 16), there(16))


def scaled() -> None:
    elements, scales = mxfp8.quantise(there(5, 64))
    assert mxfp8.dequantise(elements, scales).device.type == "meta"


@pytest.mark.parametrize("kernel", [attention, routing, experts, norms, scaled])
def test_a_kernel_follows_its_inputs(kernel: Callable[[], None]) -> None:
    kernel()


def test_a_tensor_left_on_the_cpu_is_seen() -> None:
    """The meta device would not show anything if it took tensors of the CPU."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        there(5, 4).masked_fill(torch.ones(5, 4, dtype=torch.bool), 0.0).add_(
            torch.ones(5, 4)
        ) @ torch.ones(4, 2)


def test_on_the_cpu_nothing_is_moved() -> None:
    batch = Batch.of([1, 2, 3], (3,))
    assert device.current() == torch.device("cpu")
    assert device.moved(batch) is batch
    with device.on_device():
        assert torch.empty(1).device.type == "cpu"


def test_elsewhere_batches_move_and_models_are_built_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_device", torch.device("meta"))
    moved = device.moved(Batch.of([1, 2, 3], (2, 1)))
    assert (moved.token_ids.device.type, moved.positions.device.type) == ("meta", "meta")
    assert moved.seq_lens == (2, 1)
    with device.on_device():
        assert torch.empty(1).device.type == "meta"
    assert torch.empty(1).device.type == "cpu"


def test_the_platform_of_a_gpu_is_out_of_tree(vllm_ready: None) -> None:
    """So vLLM takes the paths that it takes on the CPU, and asks for no compiled kernel."""
    from model.cuda_platform import LaunchedPlatform

    platform = LaunchedPlatform()
    assert platform.is_out_of_tree() and not platform.is_cuda_alike()
    assert (platform.device_type, platform.dispatch_key) == ("cuda", "CUDA")
    assert platform.dist_backend == "nccl"


def test_the_platform_is_chosen_by_the_device(
    vllm_ready: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model import overrides

    assert type(overrides._platform()).__name__ == "FoldedPlatform"
    monkeypatch.setattr(device, "_device", torch.device("cuda", 0))
    assert type(overrides._platform()).__name__ == "LaunchedPlatform"
