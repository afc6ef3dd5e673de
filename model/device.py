"""The device that this process's subjects live on: the CPU, unless a process is told otherwise.

A folded world is always on the CPU. Ranks that torchrun has started may have a GPU; they say so
with `use`, before vLLM's model code is imported, because vLLM asks for its platform then.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model.batch import Batch

_device = torch.device("cpu")


def use(device: torch.device) -> None:
    """From now on subjects are built on this device, and stepped there, in this process.

    Call it on each thread that runs one: a thread has a current GPU of its own.
    """
    global _device
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # The kernels promise sums in float32; by default cuBLAS may add parts of them in less.
        products = torch.backends.cuda.matmul
        products.allow_tf32 = False
        products.allow_bf16_reduced_precision_reduction = False
        products.allow_fp16_reduced_precision_reduction = False
    _device = device


def current() -> torch.device:
    """The device of this process's subjects."""
    return _device


@contextmanager
def on_device() -> Iterator[None]:
    """Within, on this thread, what does not name a device is made on the subjects' own.

    As vLLM builds a model, and only that: steps follow the device of what they are given.
    """
    if _device.type == "cpu":
        yield
        return
    with _device:
        yield


def moved(batch: Batch) -> Batch:
    """The batch with its tensors on the subjects' device."""
    if _device.type == "cpu":
        return batch
    return dataclasses.replace(
        batch, token_ids=batch.token_ids.to(_device), positions=batch.positions.to(_device)
    )
