"""Fixtures: vLLM prepared once, and a world of blocks for each way to build them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from model.subject import prepare
from tests.model.dp.harness import Arm, Blocks

Built = Callable[[Arm], Blocks]


@pytest.fixture(scope="session")
def vllm_ready() -> None:
    """vLLM's MiniMax-M3 imported, and the override table installed."""
    prepare()


@pytest.fixture(scope="module")
def built(vllm_ready: None) -> Iterator[Built]:
    """built(arm) -> its world, which arms that differ in their tokens share."""
    worlds: dict[Arm, Blocks] = {}

    def build(arm: Arm) -> Blocks:
        key = replace(arm, tokens=(), idle=False, pad=False)
        if key not in worlds:
            worlds[key] = Blocks(key)
        return worlds[key]

    yield build
    for blocks in worlds.values():
        blocks.close()
