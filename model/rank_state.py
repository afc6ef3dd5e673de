"""What vLLM keeps in globals that belongs to one rank: the table that a folded world swaps.

A real rank is a process, so vLLM keeps its groups, its current configuration and its caches in
module globals. `tests/model/test_rank_state.py` looks for entries that are missing here.
"""

from model import megamoe
from sim import RankCache, RankLocal

RANK_LOCAL: tuple[RankLocal | RankCache, ...] = (
    *megamoe.RANK_LOCAL,
    RankLocal(
        "vllm.distributed.parallel_state",
        (
            "_WORLD",
            "_INNER_DP_WORLD",
            "_NODE_COUNT",
            "_TP",
            "_ETP",
            "_ENGRAM_DP",
            "_DCP",
            "_PCP",
            "_PP",
            "_DP",
            "_EP",
            "_EPLB",
            "_groups",
            "_group_name_counter",
        ),
        "this rank's group coordinators, and the names under which custom operators find them",
    ),
    RankLocal(
        "vllm.config.vllm",
        ("_current_vllm_config", "_current_prefix"),
        "the configuration under which this rank builds its groups and its model",
    ),
    RankCache(
        "vllm.config.vllm",
        "get_cached_compilation_config",
        "remembers the compilation settings of whichever rank asked first",
    ),
    RankLocal(
        "vllm.forward_context",
        ("_forward_context", "forward_start_time"),
        "the forward pass that this rank is in, with its layers and attention metadata",
    ),
    RankLocal(
        "vllm.v1.worker.workspace",
        ("_manager",),
        "this rank's scratch memory; shared, one rank would overwrite another's in mid-layer",
    ),
    RankLocal(
        "vllm.v1.worker.ubatching",
        ("_THREAD_ID_TO_CONTEXT", "_NUM_UBATCHES", "_CURRENT_CONTEXTS"),
        "this rank's micro-batches",
    ),
    RankLocal(
        "vllm.model_executor.models.utils",
        ("_model_to_pp_missing_layer_names",),
        "the layers that this rank's stage lacks, kept by id(model): ids are used again",
    ),
    RankLocal(
        "vllm.model_executor.layers.rotary_embedding",
        ("_ROPE_DICT",),
        "this rank's rotary tables; processes do not share them, so neither do folded ranks",
    ),
    RankLocal(
        "vllm.model_executor.layers.fused_moe",
        ("_config",),
        "the MoE kernel settings that this rank is under",
    ),
    RankLocal(
        "vllm.model_executor.offloader.base",
        ("_instance",),
        "this rank's weight offloader",
    ),
    RankLocal(
        "vllm.distributed.kv_transfer.kv_transfer_state",
        ("_KV_CONNECTOR_AGENT",),
        "this rank's KV-cache connector",
    ),
    RankCache(
        "vllm.models.common.ops.sequence_parallel",
        "is_sequence_parallel_active",
        "remembers one TP size for ever, whichever group asks next",
    ),
)
"""Entries for `sim.World(rank_local=...)`; modules are imported when a world starts."""
