"""The keys of a master configuration: entries, their scenarios and the points of their sweeps.

Entries of many frameworks share one file, and have keys that only their own launchers know. So a
key that is not here is a finding only if it is nearly one that is.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Degree = Annotated[int, Field(ge=1, le=4096)]
Count = Annotated[int, Field(ge=0, le=100_000)]
Length = Annotated[int, Field(ge=1, le=100_000_000)]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


class Part(BaseModel):
    """A mapping with known keys, written with dashes."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, alias_generator=_dashed)


class Version(Part):
    """`router`, `kv-p2p-transfer` and their kin, written out."""

    name: str | None = None
    version: str | None = None


class Workers(Part):
    """One side of a disaggregated point. `tp` is also where the degree of DEP is written."""

    num_worker: Count | None = None
    tp: Degree | None = None
    ep: Degree | None = None
    pp: Degree | None = None
    dp_attn: bool | None = None
    additional_settings: list[str] | None = None


class Point(Part):
    """An item of `search-space`."""

    conc_list: list[Degree] | None = None
    conc_start: Degree | None = None
    conc_end: Degree | None = None
    spec_decoding: str | None = None
    tp: Degree | None = None
    ep: Degree | None = None
    pp: Degree | None = None
    dp_attn: bool | None = None
    prefill: Workers | None = None
    decode: Workers | None = None


class Scenario(Part):
    """An item of `scenarios.fixed-seq-len`."""

    isl: Length | None = None
    osl: Length | None = None
    search_space: list[Point] | None = None


class Entry(Part):
    """An entry."""

    image: str | None = None
    model: str | None = None
    model_prefix: str | None = None
    runner: str | None = None
    precision: str | None = None
    framework: str | None = None
    router: str | Version | None = None
    kv_p2p_transfer: str | Version | None = None
    kv_offload_backend: Any = None
    multinode: bool | None = None
    disagg: bool | None = None
    scenarios: dict[str, Any] | None = None
    seq_len_configs: Any = None
    spec_decoding: str | None = None


REQUIRED = ("image", "model", "precision", "framework", "scenarios")
"""What an entry of several nodes has."""
