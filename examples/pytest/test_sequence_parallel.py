"""vLLM's token shards: Hypothesis looks for the number of tokens at which rows get lost.

pytest examples/pytest/test_sequence_parallel.py
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankfold.testing import Worlds, assert_conserved, assert_placed, assert_same
from rankfold.testing.strategies import token_counts, topologies
from sim import Topology


@given(topology=topologies(axes=("tp",), max_ranks=4), data=st.data())
@settings(deadline=None, max_examples=20)
def test_shards_and_their_gather_keep_every_token(
    vllm_world: Worlds, topology: Topology, data: st.DataObject
) -> None:
    from vllm.models.common.ops.sequence_parallel import sp_all_gather, sp_shard

    tokens = data.draw(token_counts(topology), label="tokens")
    x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(tokens))
    world = vllm_world(topology)

    shards = world.run(lambda ctx: sp_shard(x))
    assert_placed(shards, x, "Shard(tokens, tp)", bound=0, name="shards")
    assert_conserved(x, shards, padding=True, name="tokens")

    # The gather leaves the padding rows at the end.
    whole = world.run(lambda ctx: sp_all_gather(shards[ctx.rank]))
    assert_same(whole, name="gathered")
    assert_conserved(x, whole[0], padding=True, name="tokens")


@given(topology=topologies(axes=("tp",), max_ranks=4), data=st.data())
@settings(deadline=None, max_examples=20)
def test_a_reduce_scatter_gives_shards_of_the_sum(
    vllm_world: Worlds, topology: Topology, data: st.DataObject
) -> None:
    from vllm.models.common.ops.sequence_parallel import sp_reduce_scatter

    tokens = data.draw(token_counts(topology), label="tokens")
    generator = torch.Generator().manual_seed(tokens)
    terms = torch.randn(topology.tp, tokens, 8, generator=generator)
    shards = vllm_world(topology).run(lambda ctx: sp_reduce_scatter(terms[ctx.rank]))
    assert_placed(shards, terms.double().sum(0), "Shard(tokens, tp)", name="shards")
