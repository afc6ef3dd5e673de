"""The options that say which model runs on what, of all commands that run a given one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankfold.options import Options


def add_model(command: Any) -> None:
    """Add the topology and the options of the model."""
    command.add_argument("topology", help="such as tp4, tp2pp2, tep4pp2")
    add_sizes(command)


def add_sizes(command: Any) -> None:
    """Add the options of the model."""
    command.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    command.add_argument(
        "--dtype", default="", help="float32 (default), bfloat16, float16, float64"
    )
    command.add_argument("--layers", default="dmmm", help="d dense, m MoE (default dmmm)")
    command.add_argument(
        "--attention",
        default="model",
        help="model (default): the first layer dense, the others block-sparse; or dense, sparse",
    )
    command.add_argument(
        "--moe-backend", default="auto", help="auto (default) or deep_gemm_mega_moe"
    )
    command.add_argument("--expert-dtype", default="bf16", help="of MegaMoE: bf16 (default), mxfp8")
    command.add_argument(
        "--sp", default="auto", help="auto (default): sequence-parallel where the code is; or off"
    )
    command.add_argument(
        "--chunk",
        type=int,
        default=0,
        metavar="N",
        help="most prompt tokens of a request in a step",
    )
    add_transport(command)


def add_transport(command: Any) -> None:
    """Add the option that says what the ranks are."""
    command.add_argument(
        "--transport",
        default="folded",
        help="folded (default): all ranks in this process; or gloo: a process a rank, real gloo",
    )


def options_of(arguments: argparse.Namespace, **more: Any) -> Options:
    """The options that were given.

    Raises:
        UsageError, ShapeError, TopologyError: they make no sense.
    """
    from rankfold.options import Options
    from sim import Topology

    return Options(
        topology=Topology.parse(arguments.topology),
        chunk=arguments.chunk,
        against=Topology.parse(arguments.against) if arguments.against else None,
        **sizes_of(arguments),
        **more,
    )


def sizes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of Options that `add_sizes` asks for, but the chunk."""
    names = (
        "seed", "dtype", "layers", "attention", "moe_backend", "expert_dtype", "sp", "transport",
    )  # fmt: skip
    return {name: getattr(arguments, name) for name in names}
