"""What this machine has: GPUs, and the software that would use them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SM100 = 10
"""Major compute capability of the GPUs for which MegaMoE's kernels are built."""
_SECONDS = 180.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    memory_gib: float
    capability: str
    """Such as "9.0"."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What is there. Where something is missing or does not load, the reason is in its place."""

    python: str
    torch: str
    cuda: str | None
    """Of the torch build; None for a CPU build."""
    driver: str | None
    nccl: str | None
    gpus: tuple[Gpu, ...]
    vllm: str | None
    compiled_kernels: str
    """"" if vLLM's compiled kernels load, or else why they do not."""
    deep_gemm: str
    """Likewise."""

    @property
    def real_mega_moe(self) -> str:
        """ "" if MegaMoE's own kernels can run here, or else why they cannot."""
        if not self.gpus:
            return "no CUDA GPU"
        if any(int(gpu.capability.split(".")[0]) != SM100 for gpu in self.gpus):
            found = ", ".join(sorted({gpu.capability for gpu in self.gpus}))
            return f"they need compute capability {SM100}.x, this machine has {found}"
        return self.deep_gemm


def look() -> Inventory:
    """Look at this machine. vLLM is not imported here, at most in a process of its own."""
    package = _vllm_folder()
    return Inventory(
        python=sys.version.split()[0],
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=_driver(),
        nccl=_nccl(),
        gpus=_gpus(),
        vllm=_vllm_version() if package else None,
        compiled_kernels=_loads(package, "_C*.so", "vllm._C"),
        deep_gemm=_loads(package, "third_party/deep_gemm/*.so", "vllm.third_party.deep_gemm"),
    )


def _gpus() -> tuple[Gpu, ...]:
    found = []
    for index in range(torch.cuda.device_count()):
        seen: Any = torch.cuda.get_device_properties(index)
        found.append(
            Gpu(
                name=seen.name,
                memory_gib=round(seen.total_memory / 2**30, 1),
                capability=f"{seen.major}.{seen.minor}",
            )
        )
    return tuple(found)


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=_SECONDS, check=False)
    lines = said.stdout.split() if said.returncode == 0 else []
    return lines[0] if lines else None


def _nccl() -> str | None:
    if not dist.is_nccl_available():
        return None
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _vllm_folder() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def _vllm_version() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _loads(package: Path | None, pattern: str, module: str) -> str:
    if package is None:
        return "vLLM is not installed"
    if not any(package.glob(pattern)):
        return f"this vLLM is without compiled files: no {pattern}"
    code = f"import importlib; importlib.import_module({module!r})"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if said.returncode == 0:
        return ""
    lines = said.stderr.strip().splitlines()
    return f"{module} does not load: {lines[-1] if lines else 'it says nothing'}"
