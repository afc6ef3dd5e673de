"""The keys of a recipe, as srt-slurm's layout 1 has them, and the types of their values.

Every model is strict: a key that is not here is a finding, and so is a number in quotes. What the
field writes freely (environment variables, SLURM options, command-line flags) is a mapping.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, le=100_000)]
Positive = Annotated[int, Field(ge=1, le=100_000)]
Length = Annotated[int, Field(ge=1, le=100_000_000)]
"""Tokens."""
Free = dict[str, Any]
Texts = dict[str, str]
"""Environment variables and options, which srt-slurm takes as text only."""


class Part(BaseModel):
    """A mapping with known keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Model(Part):
    """`model`: what is served."""

    path: str | None = None
    container: str | None = None
    precision: str | None = None
    stage_dir: str | None = None


class Resources(Part):
    """`resources`: nodes, workers and GPUs."""

    gpu_type: str | None = None
    gpus_per_node: Positive | None = None
    prefill_nodes: Count | None = None
    decode_nodes: Count | None = None
    prefill_workers: Count | None = None
    decode_workers: Count | None = None
    gpus_per_prefill: Positive | None = None
    gpus_per_decode: Positive | None = None
    agg_nodes: Count | None = None
    agg_workers: Count | None = None
    gpus_per_agg: Positive | None = None
    spread_workers: bool | None = None
    het_jobs: bool | None = None


class Dynamo(Part):
    """`dynamo`: which Dynamo is installed."""

    install: bool | None = None
    version: str | None = None
    wheel: str | None = None
    hash: str | None = None
    top_of_tree: bool | None = None
    cargo_patches: list[str] | None = None
    request_plane: str | None = None
    event_plane: str | None = None
    source: Free | None = None
    sidecar: bool | None = None


class Frontend(Part):
    """`frontend`: routers."""

    type: str | None = None
    enable_multiple_frontends: bool | None = None
    num_additional_frontends: Count | None = None
    nginx_container: str | None = None
    nginx_session_affinity: bool | None = None
    nginx_session_affinity_header: str | None = None
    nginx_raise_ulimit: bool | None = None
    nginx_keepalive_timeout: str | None = None
    worker_selection: Free | None = None
    container_image: str | None = None
    numa_bind: bool | None = None
    ctx_router: Free | None = None
    gen_router: Free | None = None
    server_config_extra: Free | None = None
    placement: Free | None = None
    args: Free | None = None
    env: Texts | None = None
    orchestrator_placement: str | None = None
    dedicated_node: bool | None = None


class Flags(Part):
    """`backend.vllm_config`: command-line flags of each side, without their dashes."""

    prefill: Free | None = None
    decode: Free | None = None
    aggregated: Free | None = None


class Backend(Part):
    """`backend`: the engine and how its workers start."""

    type: str | None = None
    connector: str | None = None
    prefill_environment: Texts | None = None
    decode_environment: Texts | None = None
    aggregated_environment: Texts | None = None
    vllm_config: Flags | None = None
    sglang_config: Free | None = None
    trtllm_config: Free | None = None
    allow_prefill_decode_colocation: bool | None = None
    allow_prefill_decode_colocation_across_nodes: bool | None = None
    dp_launch_mode: str | None = None
    set_visible_devices: bool | None = None
    kv_events_config: Any = None
    mooncake_kv_store: Free | None = None
    failover: Free | None = None
    vllm_serve_binary: str | None = None


class HealthCheck(Part):
    """`health_check`: how long workers may take to start."""

    max_attempts: Positive | None = None
    interval_seconds: Positive | None = None
    fatal_log_markers: bool | None = None
    extra_fatal_log_patterns: list[str] | None = None


class Benchmark(Part):
    """`benchmark`: the load."""

    type: str | None = None
    command: str | None = None
    isl: Length | None = None
    osl: Length | None = None
    concurrencies: str | list[Positive] | Positive | None = None
    req_rate: str | int | float | None = None
    random_range_ratio: float | int | None = None
    num_prompts_mult: Positive | None = None
    num_warmup_mult: Count | None = None
    use_chat_template: bool | None = None
    tokenizer_mode: str | None = None
    custom_tokenizer: str | None = None
    skip_initial_test: bool | None = None
    num_examples: Positive | None = None
    num_requests: Positive | None = None
    num_shots: Count | None = None
    num_threads: Positive | None = None
    max_tokens: Length | None = None
    max_context_length: Length | None = None
    repeat: Positive | None = None
    concurrency: Positive | None = None
    categories: list[str] | None = None
    temperature: float | int | None = None
    top_p: float | int | None = None
    top_k: int | None = None
    prefix_ratios: Any = None
    mooncake_workload: str | None = None
    ttft_threshold_ms: Positive | None = None
    itl_threshold_ms: Positive | None = None
    trace_file: str | None = None
    sweep: Free | None = None
    env: Texts | None = None
    aiperf_args: Any = None
    aiperf_package: str | None = None
    aiperf_server_metrics: bool | None = None
    stream_output: bool | None = None
    placement: Free | None = None
    colocate_with_frontend: bool | None = None
    dataset_name: str | None = None
    dataset_path: str | None = None
    agentperf_client_dir: str | None = None
    agentperf_config: str | None = None
    reuse_http_connections: bool | None = None
    container_image: str | None = None
    slow_down_sleep_time: float | int | None = None
    slow_down_wait_time: float | int | None = None
    client_placement: str | None = None
    client_dedicated_node: bool | None = None


class Slurm(Part):
    """`slurm`: the job."""

    account: str | None = None
    partition: str | None = None
    time_limit: str | int | None = None


class Infra(Part):
    """`infra`: discovery services."""

    etcd_nats_dedicated_node: bool | None = None
    nats_max_payload_mb: Positive | None = None


class IdentityModel(Part):
    """`identity.model`."""

    repo: str | None = None
    revision: str | None = None


class IdentityContainer(Part):
    """`identity.container`."""

    image: str | None = None
    digest: str | None = None


class Identity(Part):
    """`identity`: what a run must find itself to be."""

    model: IdentityModel | None = None
    container: IdentityContainer | None = None
    frameworks: dict[str, str] | None = None


class RecipeModel(Part):
    """A recipe. Required keys are in `REQUIRED`, so that a recipe without one is still read."""

    schema_: Positive | None = Field(default=None, alias="schema")
    name: str | None = None
    model: Model | None = None
    resources: Resources | None = None
    dynamo: Dynamo | None = None
    frontend: Frontend | None = None
    backend: Backend | None = None
    health_check: HealthCheck | None = None
    benchmark: Benchmark | None = None
    slurm: Slurm | None = None
    infra: Infra | None = None
    identity: Identity | None = None
    setup_script: str | None = None
    srun_options: Texts | None = None
    sbatch_directives: Texts | None = None
    environment: Texts | None = None
    container_mounts: Texts | None = None
    extra_mount: list[str] | None = None
    enable_config_dump: bool | None = None
    profiling: Free | None = None
    output: Free | None = None
    reporting: Free | None = None
    telemetry: Free | None = None
    observability: Free | None = None
    host_setup: Free | None = None
    services: list[Any] | None = None
    post_eval: Free | None = None


REQUIRED = (
    ("name",),
    ("model",),
    ("model", "path"),
    ("model", "container"),
    ("model", "precision"),
    ("resources",),
    ("resources", "gpu_type"),
)
"""Paths that every recipe has. Of a path whose beginning is missing, only the beginning is told."""
