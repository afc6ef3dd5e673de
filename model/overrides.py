"""Every name of vLLM and torch that is replaced, in one table, with the reason beside it.

`TABLE` is the whole of it: nothing else in this project sets an attribute of vLLM. `install` puts
the replacements in and keeps the originals; `uninstall` puts the originals back.
"""

import importlib
import importlib.util
import inspect
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from model import device, megamoe

Kind = Literal["leaf kernel", "platform hook", "transport"]

_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Override:
    """One replaced name."""

    target: str
    """"module:attribute", "module:Class.attribute" or "module:mapping[key]"."""
    kind: Kind
    """leaf kernel: computes on one rank's tensors; platform hook: what vLLM asks its platform;
    transport: how processes of one machine talk, which ranks of one process cannot."""
    reason: str
    """Why the name is replaced, and by what."""
    replacement: Callable[[], Any]
    """Makes the value to put there; called when the override is installed."""


def _kernel(path: str) -> Callable[[], Any]:
    """The attribute at "module:attribute", looked up when needed."""

    def load() -> Any:
        module, attribute = path.split(":")
        return getattr(importlib.import_module(module), attribute)

    return load


def _flashinfer_norm() -> types.ModuleType:
    norm = importlib.import_module("model.kernels.norm")
    module = types.ModuleType("flashinfer.norm", "Gemma norms in plain torch.")
    module.gemma_rmsnorm = norm.gemma_rmsnorm  # type: ignore[attr-defined]
    module.gemma_fused_add_rmsnorm = norm.gemma_fused_add_rmsnorm  # type: ignore[attr-defined]
    return module


def _registered(path: str) -> Callable[[], Any]:
    """The registry's entry for the model class at "module:class"."""

    def load() -> Any:
        registry = importlib.import_module("vllm.model_executor.models.registry")
        return registry._RegisteredModel.from_model_cls(_kernel(path)())

    return load


def _norm_overrides() -> tuple[Override, ...]:
    reason = "Gemma RMSNorm is a CUDA kernel of FlashInfer, imported when a norm runs"
    if importlib.util.find_spec("flashinfer") is not None:
        return tuple(
            Override(
                target=f"flashinfer.norm:{name}",
                kind="leaf kernel",
                reason=reason,
                replacement=_kernel(f"model.kernels.norm:{name}"),
            )
            for name in ("gemma_rmsnorm", "gemma_fused_add_rmsnorm")
        )
    # Only the submodule: vLLM still finds no `flashinfer`, and keeps off its other paths.
    return (
        Override(
            target="sys:modules[flashinfer.norm]",
            kind="leaf kernel",
            reason=reason,
            replacement=_flashinfer_norm,
        ),
    )


def _platform() -> Any:
    on_cpu = device.current().type == "cpu"
    path = "model.platform:FoldedPlatform" if on_cpu else "model.cuda_platform:LaunchedPlatform"
    return _kernel(path)()()


PLATFORM: tuple[Override, ...] = (
    Override(
        target="vllm.platforms:_current_platform",
        kind="platform hook",
        reason="vLLM's choice of platform; the entry point sets the same where it is installed",
        replacement=_platform,
    ),
)
"""What tells vLLM where it is."""

NO_ACCELERATOR: tuple[Override, ...] = (
    Override(
        target="torch.accelerator:empty_cache",
        kind="platform hook",
        reason="vLLM empties the accelerator's cache when a workspace grows; there is none",
        replacement=lambda: lambda: None,
    ),
    Override(
        target="torch.accelerator:synchronize",
        kind="platform hook",
        reason="vLLM waits for the accelerator around communication; there is none",
        replacement=lambda: lambda device=None: None,
    ),
)
"""What vLLM asks of an accelerator; not installed where there is one."""

ACTIVATION: tuple[Override, ...] = PLATFORM + NO_ACCELERATOR
"""What must be in place before vLLM's model code is imported."""

KERNELS: tuple[Override, ...] = (
    *_norm_overrides(),
    Override(
        target="vllm._custom_ops:fused_minimax_m3_qknorm_rope_kv_insert",
        kind="leaf kernel",
        reason="QK-norm, RoPE and cache insert are one CUDA kernel",
        replacement=_kernel("model.kernels.qknorm_rope:fused_minimax_m3_qknorm_rope_kv_insert"),
    ),
    Override(
        target="vllm._custom_ops:topk_sigmoid",
        kind="leaf kernel",
        reason="top-k routing is a CUDA kernel",
        replacement=_kernel("model.kernels.topk_sigmoid:topk_sigmoid"),
    ),
    *(
        Override(
            target=f"vllm.models.minimax_m3.common.indexer:{name}",
            kind="leaf kernel",
            reason="the lightning indexer's scores and top-k are Triton kernels",
            replacement=_kernel(f"model.kernels.index_topk:{name}"),
        )
        for name in ("minimax_m3_index_score", "minimax_m3_index_topk", "minimax_m3_index_decode")
    ),
    *(
        Override(
            target=f"vllm.models.minimax_m3.common.sparse_attention:{name}",
            kind="leaf kernel",
            reason="block-sparse attention over the paged cache is a Triton kernel",
            replacement=_kernel(f"model.kernels.sparse_attention:{name}"),
        )
        for name in ("minimax_m3_sparse_attn", "minimax_m3_sparse_attn_decode")
    ),
    Override(
        target="vllm.model_executor.custom_op:op_registry_oot[UnquantizedFusedMoEMethod]",
        kind="leaf kernel",
        reason="the expert GEMMs; the entry that CustomOp.register_oot makes for a platform's own",
        replacement=_kernel("model.experts_method:FoldedUnquantizedFusedMoEMethod"),
    ),
    *(
        Override(
            target=f"vllm.model_executor.models.registry:ModelRegistry.models[{name}]",
            kind="platform hook",
            reason="the entry that ModelRegistry.register_model makes; vLLM's own starts a second "
            "process to inspect the class",
            replacement=_registered(f"vllm.models.minimax_m3.nvidia.{module}:{name}"),
        )
        for module, name in (("model", "MiniMaxM3SparseForCausalLM"), ("mtp", "MiniMaxM3MTP"))
    ),
)
"""What computes, and what makes vLLM find it."""

FOLDED: tuple[Override, ...] = (
    Override(
        target="vllm.distributed.device_communicators.shm_broadcast:"
        "MessageQueue.create_from_process_group",
        kind="transport",
        reason="a shared-memory queue waits for its peers without letting another folded rank "
        "run; without it vLLM broadcasts objects over the process group",
        replacement=lambda: staticmethod(lambda *args, **kwargs: None),
    ),
    Override(
        target="vllm.distributed.parallel_state:suppress_stdout",
        kind="transport",
        reason="redirects the process's stdout while a group is made, to hide what gloo prints; "
        "folded ranks share that stdout and make groups in turns",
        replacement=lambda: nullcontext,
    ),
)
"""What ranks that share a process cannot use; not installed for ranks that are processes."""

MEGAMOE: tuple[Override, ...] = megamoe.overrides(Override)
"""What MegaMoE's kernels need; not installed where their own GPU and module are."""

TABLE: tuple[Override, ...] = ACTIVATION + KERNELS + MEGAMOE + FOLDED

_originals: dict[str, Any] = {}


def install_activation() -> None:
    """Install only what must precede the import of vLLM's model code. Idempotent."""
    _install(ACTIVATION if device.current().type == "cpu" else PLATFORM)


def install(*, folded: bool = True) -> None:
    """Install the table. Idempotent; main thread only, before the ranks start.

    Args:
        folded: False leaves out `FOLDED`, for ranks that are processes.

    Importing vLLM's model code is part of it, which takes seconds the first time.
    """
    from model import plugin

    plugin.activate()
    platforms = importlib.import_module("vllm.platforms")
    on_gpu = platforms.current_platform.device_type == "cuda"
    stand_ins = () if on_gpu and megamoe.real_deep_gemm() else MEGAMOE
    _install(KERNELS + stand_ins + (FOLDED if folded else ()))


def uninstall() -> None:
    """Put every original back, last replaced first. Idempotent."""
    for target in reversed(list(_originals)):
        _write(target, _originals.pop(target))


def installed() -> tuple[Override, ...]:
    """The overrides that are in place now, in table order."""
    return tuple(override for override in TABLE if override.target in _originals)


def _install(overrides: tuple[Override, ...]) -> None:
    for override in overrides:
        if override.target in _originals:
            continue
        replacement = override.replacement()
        original = _read(override.target)
        _write(override.target, replacement)
        _originals[override.target] = original


def _resolve(target: str) -> tuple[Any, str, bool]:
    """The object that holds the name, the name, and whether the object is a mapping."""
    module_name, path = target.split(":")
    key = None
    if path.endswith("]"):
        path, key = path[:-1].split("[")
    holder: Any = importlib.import_module(module_name)
    *parents, last = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    return (holder, last, False) if key is None else (getattr(holder, last), key, True)


def _read(target: str) -> Any:
    holder, name, is_mapping = _resolve(target)
    if is_mapping:
        return holder.get(name, _ABSENT)
    # Static, so that a staticmethod comes back as one.
    return inspect.getattr_static(holder, name)


def _write(target: str, value: Any) -> None:
    holder, name, is_mapping = _resolve(target)
    if not is_mapping:
        setattr(holder, name, value)
    elif value is _ABSENT:
        holder.pop(name, None)
    else:
        holder[name] = value
