"""The subject: vLLM's MiniMax-M3 on one rank, and the driver that steps it through its stage."""

import copy
import functools
import importlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from model import device, dp, overlay, overrides, survival, taps
from model.batch import Batch
from model.groups import group_labels, join_groups
from model.handover import layout
from model.kv_cache import KVCaches
from model.provenance import Loaded, Numbering, trace
from model.survival import Overwritten
from model.taps import Captured
from model.tiny import TinyM3
from sim import RankContext, Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """What one rank has after a step."""

    stage: int
    """Pipeline stage of the rank."""
    taps: dict[str, Captured] = field(default_factory=dict)
    """This rank's taps by name, in the order of the computation; empty if not asked for."""
    logits: torch.Tensor | None = None
    """[T, V] on the last stage, else None; in the model's dtype."""
    logprobs: torch.Tensor | None = None
    """log_softmax of the logits in float32 (float64 for a float64 model), else None."""
    overwritten: tuple[Overwritten, ...] = ()
    """Values whose bits changed before their last use; looked for where taps are."""


def prepare(*, folded: bool = True) -> None:
    """Import vLLM's MiniMax-M3 and install the override table. Idempotent.

    Call it on the main thread before a world starts. `folded=False` is for ranks that are
    processes.
    """
    overrides.install(folded=folded)


class Subject:
    """One rank's model, built by vLLM's own code from a full checkpoint.

    Build it inside a rank, on all ranks of the world at once: building makes the groups. The
    weights are copied, so all ranks may pass the same tensors.

    Raises ShapeError if the topology cannot cut the model, and RuntimeError before `prepare`.
    """

    def __init__(
        self,
        ctx: RankContext,
        tiny: TinyM3,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
        *,
        moe_backend: str = "auto",
        sequence_parallel: bool = True,
        aux: tuple[int, ...] = (),
        numbering: Numbering | None = None,
        requests: int = 8,
        page: int = 0,
    ) -> None:
        """Build the model.

        Args:
            ctx: this rank.
            tiny: the model's sizes.
            weights: the full checkpoint.
            dtype: of weights and activations.
            moe_backend: vLLM's name for it: "auto" or "deep_gemm_mega_moe".
            sequence_parallel: False keeps the stream replicated where it would be sharded.
            aux: ids of aux hidden states to capture; id k is the stream before layer k.
            numbering: of the checkpoint, to find out first which of its elements is loaded where.
            requests: sequences that the KV caches can hold at a time.
            page: tokens of a page of the KV caches; 0 is a block of sparse attention, which sparse
                layers need.
        """
        if not overrides.installed():
            raise RuntimeError("call model.subject.prepare() on the main thread first")
        check(tiny, ctx.topology)
        self.tiny = tiny
        self.dtype = dtype
        self._dummy = requests
        self._recorder = taps.Recorder()
        self._survival = survival.Survival()
        self._config = vllm_config(tiny, ctx.topology, dtype, ctx.rank)
        if page:
            self._config.cache_config.block_size = page
        self._config.kernel_config.moe_backend = moe_backend
        if not sequence_parallel:
            self._config.additional_config = {overlay.SEQUENCE_PARALLEL_KEY: False}
        with _current(self._config):
            join_groups(ctx)
            self.model, self.loaded = _build(self._config, weights, dtype, numbering)
            # One more than is asked for: a dummy row's.
            self.caches = KVCaches(self._config, requests + (ctx.topology.dp > 1))
            self.held = layout.held_by(self.caches, tiny, ctx.topology, ctx.rank)
        state = _parallel_state()
        self._tp, self._pp = state.get_tp_group(), state.get_pp_group()
        self._aux: tuple[int, ...] = ()
        self.capture_aux(aux)
        placements = importlib.import_module("model.overlay.placements")
        taps.attach(self.model, self._recorder, placements.placements(self.model))
        survival.attach(self.model, self._survival)

    def capture_aux(self, aux: tuple[int, ...]) -> None:
        """From now on capture the aux hidden states of these ids; id k is the stream before layer
        k."""
        aux = tuple(sorted(set(aux)))
        if aux == self._aux:
            return
        self._aux = aux
        self.model.set_aux_hidden_state_layers(self._aux)

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return int(self._pp.rank_in_group)

    @torch.no_grad()
    def step(self, batch: Batch, *, capture: bool = True) -> StepResult:
        """Run the batch through this rank's stage; all ranks step together.

        The ranks of one DP rank give equal batches, and DP ranks each their own. An empty batch
        goes through the same code: every collective still runs. Where other DP ranks have tokens,
        it takes a dummy row, as in vLLM, of which the result has nothing.

        Raises ValueError if a sequence does not begin anew and does not go on where the KV caches
        are.
        """
        rows = dp.agree(self._config, batch.tokens)
        idle = rows.count > batch.tokens
        if idle:
            batch = device.moved(dp.dummy_batch(rows, self._dummy))
        if capture:
            self._recorder.start(0 if idle else None)
            self._survival.start(batch)
        received = self._receive()
        output = self._forward(batch, rows, received)
        if not self._pp.is_last_rank:
            return self._hand_on(received, output)
        hidden, aux = output if isinstance(output, tuple) else (output, [])
        logits = self.model.compute_logits(hidden)
        if idle:
            logits = logits[:0]
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        logprobs = torch.log_softmax(logits.to(wide), dim=-1)
        self._recorder.record("logits", logits)
        self._recorder.record("logprobs", logprobs)
        for aux_id, value in zip(self._aux, aux, strict=True):
            self._recorder.record(f"aux.{aux_id}", value)
        return StepResult(
            stage=self.stage,
            taps=self._recorder.stop(),
            logits=logits,
            logprobs=logprobs,
            overwritten=self._survival.stop(),
        )

    def partial_result(self) -> StepResult:
        """What this rank recorded of a step that broke on it or on another rank."""
        self._recorder.stop()
        return StepResult(
            stage=self.stage, taps=self._recorder.latest, overwritten=self._survival.stop()
        )

    def _hand_on(self, received: Any, output: Any) -> StepResult:
        """Send what the next stage needs, with the aux hidden states of the stages before."""
        relay = importlib.import_module("model.overlay.relay")
        output = relay.relay_aux_hidden_states(self.model, received, output)
        self._recorder.record_all(f"stage.{self.stage}.send", output.tensors)
        self._pp.send_tensor_dict(output.tensors, all_gather_group=self._tp)
        return StepResult(
            stage=self.stage, taps=self._recorder.stop(), overwritten=self._survival.stop()
        )

    def labels(self) -> dict[str, dist.ProcessGroup]:
        """This rank's process groups by name: "tp" moves tensors, "tp.cpu" objects, and so on."""
        return group_labels()

    def _receive(self) -> Any:
        """The intermediate tensors of the stage before, or None on the first."""
        if self._pp.is_first_rank:
            return None
        received = self._pp.recv_tensor_dict(all_gather_group=self._tp)
        self._recorder.record_all(f"stage.{self.stage}.recv", received)
        return importlib.import_module("vllm.sequence").IntermediateTensors(received)

    def _forward(self, batch: Batch, rows: dp.Rows, intermediate: Any) -> Any:
        paged = self.caches.place(batch)
        # vLLM's parameters are a class of their own, for loading. What they do to the functions of
        # torch is nothing, at the cost of a function.
        with (
            dp.forward_context(self._config, paged.metadata, rows, slot_mapping=paged.slot_mapping),
            torch._C.DisableTorchFunctionSubclass(),
        ):
            return self.model(batch.token_ids, batch.positions, intermediate)


def check(tiny: TinyM3, topology: Topology) -> None:
    """Raise ShapeError, in one line, if the subject cannot run this topology."""
    tiny.validate(topology)


def vllm_config(tiny: TinyM3, topology: Topology, dtype: torch.dtype, rank: int) -> Any:
    """A VllmConfig for one rank, as `vllm serve` would make it, without tokenizer or files."""
    config = importlib.import_module("vllm.config")
    model = copy.deepcopy(_model_config(tiny, dtype))
    parallel = dp.parallel_config(topology, rank)
    made = config.VllmConfig(model_config=model, parallel_config=parallel)
    # A page of the caches is a block of sparse attention.
    made.cache_config.block_size = tiny.sparse_block_size
    return made


@functools.lru_cache(maxsize=32)
def _model_config(tiny: TinyM3, dtype: torch.dtype) -> Any:
    """What does not depend on the rank; vLLM writes into it, so every rank takes a copy."""
    config = importlib.import_module("vllm.config")
    with tempfile.TemporaryDirectory(prefix="rankfold") as directory:
        tiny.write_config_dir(directory)
        return config.ModelConfig(
            model=directory,
            tokenizer=directory,
            skip_tokenizer_init=True,
            dtype=dtype,
            seed=0,
            max_model_len=tiny.max_position_embeddings,
            enforce_eager=True,
        )


def _build(
    config: Any,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    numbering: Numbering | None,
) -> tuple[Any, Loaded | None]:
    loader = importlib.import_module("vllm.model_executor.model_loader.utils")
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    workspace.init_workspace_manager(device.current())
    with _default_dtype(dtype), device.on_device():
        model = overlay.model_class(config)(vllm_config=config)
    loaded = trace(model, numbering) if numbering is not None else None
    model.load_weights(weights.items())
    loader.process_weights_after_loading(model, config.model_config, device.current())
    return model.eval(), loaded


@contextmanager
def _current(config: Any) -> Iterator[None]:
    with importlib.import_module("vllm.config").set_current_vllm_config(config):
        yield


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _parallel_state() -> Any:
    return importlib.import_module("vllm.distributed.parallel_state")
