"""Makes vLLM run on the folded platform: its plugin entry point, and the same for our programs.

`register` is the entry point of the group `vllm.platform_plugins`; it stays silent unless
RANKFOLD_PLATFORM=1, so that installing rankfold beside a vLLM never changes that vLLM.
`activate` is what our own programs call: it needs no installed entry point.
"""

import importlib
import logging
import os
import sys
import warnings
from typing import Any

import torch

PLATFORM = "model.platform.FoldedPlatform"

# The library object deregisters its operators when it is collected, so it lives here.
_torchvision_library: torch.library.Library | None = None


def register() -> str | None:
    """Name the folded platform to vLLM, if RANKFOLD_PLATFORM=1 asks for it.

    Returns the qualified class name that vLLM then instantiates, or None to stay out of its way.
    """
    if os.environ.get("RANKFOLD_PLATFORM") != "1":
        return None
    _supply_torchvision_operators()
    return PLATFORM


def activate() -> None:
    """Put this process's vLLM on the folded platform. Idempotent; main thread only.

    Call it before anything imports vLLM's model code: that code asks for the platform while it is
    being imported. Raises RuntimeError, in one line, if vLLM has already chosen another platform.
    """
    os.environ["RANKFOLD_PLATFORM"] = "1"
    # vLLM compiles a few functions as it defines them: seconds of tracing, and a C++ compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _quieten()
    _supply_torchvision_operators()
    platforms: Any = importlib.import_module("vllm.platforms")
    from model.platform import FoldedPlatform

    current = platforms._current_platform
    if current is not None and not isinstance(current, FoldedPlatform):
        raise RuntimeError(
            f"vLLM already runs on {type(current).__name__}; "
            "call model.plugin.activate() before importing vLLM's model code"
        )
    from model import overrides

    overrides.install_activation()


def _quieten() -> None:
    """Keep the start-up chatter of vLLM and torch out of our programs' output."""
    # vLLM reads the variable, but as a library it sets up no logging; a user's choice stays.
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level.upper())
    if level == "ERROR":
        # It reports absent Triton kernels as an error; no kernel of Triton runs here.
        logging.getLogger("vllm.utils.import_utils").setLevel(logging.CRITICAL)
        logging.getLogger("vllm.model_executor.layers.fused_moe").setLevel(logging.CRITICAL)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    # vLLM pickles into bytes and views them as a tensor; it calls names torch has since renamed.
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")


def _supply_torchvision_operators() -> None:
    """Define torchvision::nms and ::qnms when torchvision's compiled part does not fit this torch.

    A torchvision built for another torch (CUDA against CPU) loads no operators and then fails in
    its own import, which vLLM's multi-modal processors need. Nothing here ever calls them.
    """
    global _torchvision_library
    if _torchvision_library is not None or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _torchvision_library = library
        importlib.import_module("torchvision")
