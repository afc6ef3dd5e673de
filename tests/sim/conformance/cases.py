"""The conformance suite as data: which program, with which operands, against which truths.

A case is run folded and, unless it says that gloo cannot, over gloo; and against the numpy
reference where it has a `truth`. What gloo refuses or gets wrong is a case of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from tests.sim.conformance import programs, programs_groups, programs_messages, truths
from tests.sim.conformance.case import Case, Options, each, kinds
from tests.sim.conformance.operands import FLOAT8, FLOATS, INTEGERS

ROOT = st.integers(0, 3)
ROWS = st.integers(0, 3)
SHAPES = st.one_of(
    st.lists(st.integers(0, 3), min_size=0, max_size=3).map(tuple),
    st.sampled_from([(), (0, 2), (1,), (3, 2)]),
)
WITH_ROWS = SHAPES.filter(bool)
NOT_EMPTY = st.lists(st.integers(1, 3), min_size=2, max_size=3).map(tuple)

ARITHMETIC = ("sum", "product", "min", "max")
BITWISE = ("band", "bor", "bxor")
REFUSED = (torch.int16, FLOAT8)
REDUCED = (
    *each(kind=kinds(FLOATS, "whole"), op=(*ARITHMETIC, "avg")),
    *each(kind=kinds(FLOATS, "real"), op=("sum", "product", "avg")),
    *each(kind=kinds((*INTEGERS, torch.bool), "whole"), op=(*ARITHMETIC, *BITWISE)),
)
"""Every reduce op over every dtype that has it and that gloo takes."""
SUMMED = (
    *each(kind=kinds(FLOATS, "real"), op=("sum", "avg")),
    *each(kind=kinds((*INTEGERS, torch.bool), "whole"), op=("sum", "max", "bxor")),
)
"""The same dtypes, with fewer reduce ops: for the second and later collectives that reduce."""
REDUCED_BY_US = (
    *each(kind=kinds([FLOAT8], "whole", "real"), op=(*ARITHMETIC, "avg")),
    *each(kind=kinds([torch.int16], "whole"), op=(*ARITHMETIC, *BITWISE)),
)
PREMULTIPLIED = each(kind=kinds((*FLOATS, FLOAT8), "real"), op=["premul_sum"])
MOVED = each(kind=kinds((*FLOATS, *INTEGERS, torch.bool), "bits"))
MOVED_BY_US = each(kind=kinds(REFUSED, "bits"))
SPREAD = ("transposed", "strided")


NO_DTYPE: Options = {
    "gloo": False,
    "why": "gloo has no int16 and no float8",
    "error": "Invalid scalar type",
}
NO_PREMUL: Options = {
    "gloo": False,
    "why": "gloo has no premul_sum",
    "error": "(PREMUL_SUM with Gloo|Invalid scalar type)",
}
IN_SILENCE = "gloo takes what lies in memory, in that order and holes included, and says nothing"


def _collective(name: str, draws: Options, reduced: tuple[Options, ...] = ()) -> list[Case]:
    """A collective over every dtype: what gloo can do, and what it refuses.

    Args:
        name: of the program and of its truth.
        draws: strategies of its options.
        reduced: for a collective that reduces, its kinds and reduce ops.
    """
    common: Options = {
        "program": getattr(programs, name),
        "truth": getattr(truths, name),
        "draws": draws,
    }
    ours = REDUCED_BY_US if reduced else MOVED_BY_US
    cases = [
        Case(name=name, variants=reduced or MOVED, **common),
        Case(name=f"{name}, int16 and float8", variants=ours, **common, **NO_DTYPE),
    ]
    if reduced:
        cases.append(
            Case(name=f"{name}, premul_sum", variants=PREMULTIPLIED, **common, **NO_PREMUL)
        )
    return cases


def _spread(name: str, draws: Options, layouts: Sequence[str], **more: Any) -> Case:
    """A collective over operands that are not contiguous."""
    reduces = name.startswith(("all_reduce", "reduce"))
    of = kinds([torch.float32, torch.int64], "whole" if reduces else "bits", layouts=layouts)
    return Case(
        name=f"{name}, {' and '.join(layouts)}",
        program=getattr(programs, name),
        truth=getattr(truths, name),
        draws=draws,
        variants=each(kind=of, op=["sum"]) if reduces else each(kind=of),
        **more,
    )


def _odd(name: str, what: str, **more: Any) -> Case:
    """A collective under circumstances of its own."""
    return Case(
        name=f"{name}, {what}",
        program=getattr(programs, name),
        **{"truth": getattr(truths, name, None), "variants": MOVED[:2], **more},
    )


def _own(module: Any, name: str, **more: Any) -> Case:
    """A program that only gloo can answer for: it has no numpy form."""
    return Case(name=name.replace("_", " "), program=getattr(module, name), **more)


COLLECTIVES = [
    *_collective("all_reduce", {"shape": SHAPES}, REDUCED),
    *_collective("reduce", {"shape": SHAPES, "root": ROOT}, SUMMED),
    *_collective("reduce_scatter", {"cols": ROWS, "uneven": st.booleans()}, SUMMED),
    *_collective("reduce_scatter_tensor", {"shape": WITH_ROWS}, SUMMED),
    *_collective("broadcast", {"shape": SHAPES, "root": ROOT}),
    *_collective("all_gather", {"shape": SHAPES}),
    *_collective("all_gather_into_tensor", {"shape": WITH_ROWS, "stacked": st.just(False)}),
    *_collective("gather", {"shape": SHAPES, "root": ROOT}),
    *_collective("scatter", {"shape": SHAPES, "root": ROOT}),
    *_collective("all_to_all", {"cols": ROWS, "uneven": st.just(False)}),
    *_collective("all_to_all_single", {"rows": ROWS, "cols": ROWS}),
    *_collective("all_to_all_single_uneven", {"cols": ROWS}),
    Case(
        name="ring",
        program=programs.ring,
        truth=truths.ring,
        draws={"shape": SHAPES},
        variants=(*MOVED, *MOVED_BY_US),
    ),
]
"""Every collective over every dtype."""

LAYOUTS = [
    _spread("all_reduce", {"shape": NOT_EMPTY}, ["transposed"]),
    _spread("all_reduce", {"shape": NOT_EMPTY}, ["strided"], gloo=False, why=IN_SILENCE),
    _spread("broadcast", {"shape": NOT_EMPTY, "root": ROOT}, ["transposed"]),
    _spread(
        "broadcast", {"shape": NOT_EMPTY, "root": ROOT}, ["strided"], gloo=False, why=IN_SILENCE
    ),
    _spread("all_gather", {"shape": NOT_EMPTY}, SPREAD),
    _spread("all_gather_into_tensor", {"shape": NOT_EMPTY, "stacked": st.just(False)}, SPREAD),
    _spread("gather", {"shape": NOT_EMPTY, "root": ROOT}, SPREAD),
    _spread("scatter", {"shape": NOT_EMPTY, "root": ROOT}, SPREAD, gloo=False, why=IN_SILENCE),
    _spread("reduce_scatter_tensor", {"shape": NOT_EMPTY}, SPREAD),
    _spread("all_to_all", {"cols": st.integers(2, 3), "uneven": st.just(False)}, SPREAD),
    _spread(
        "ring",
        {"shape": st.just((3, 2))},
        SPREAD,
        gloo=False,
        why="gloo sends and receives contiguous tensors only",
        error="has to be contiguous",
    ),
    _spread(
        "all_to_all_single",
        {"rows": st.integers(1, 3), "cols": st.integers(2, 3)},
        SPREAD,
        gloo=False,
        why="gloo takes contiguous tensors only",
        error="must be contiguous",
    ),
]
"""Operands that are not contiguous."""

UNEVEN = [
    _odd(
        "all_gather_uneven",
        "list",
        draws={"cols": ROWS},
        gloo=False,
        why="gloo's all_gather wants equal shapes",
        error="invalid tensor size",
    ),
    _odd(
        "all_to_all",
        "uneven",
        draws={"cols": ROWS, "uneven": st.just(True)},
        gloo=False,
        why="gloo's all_to_all of lists wants equal shapes",
        error="invalid tensor size",
    ),
    _odd(
        "gather_uneven",
        "list",
        draws={"cols": ROWS, "root": ROOT},
        gloo=False,
        why="gloo's root raises for unequal shapes, and leaves the others waiting",
    ),
    _odd(
        "scatter_uneven",
        "list",
        draws={"cols": ROWS, "root": ROOT},
        gloo=False,
        why="gloo's root raises for unequal shapes, and leaves the others waiting",
    ),
    _odd(
        "all_gather_into_tensor",
        "stacked",
        draws={"shape": SHAPES, "stacked": st.just(True)},
        gloo=False,
        why="gloo wants the output's dim 0 to be the input's, times the ranks",
        error="invalid tensor size",
    ),
    _odd(
        "reduce_scatter_tensor",
        "into scalars",
        draws={"shape": st.just(())},
        variants=SUMMED,
        gloo=False,
        why="gloo's processes die of a segmentation fault",
    ),
]
"""Shapes that differ from rank to rank, new dims, and scalars."""

ALIASED = [
    _odd(
        "all_gather_into_tensor_aliased",
        "in place",
        draws={"rows": ROWS},
        truth=truths.aliased_all_gather,
    ),
    _odd(
        "all_gather_aliased",
        "in place",
        draws={"rows": ROWS},
        truth=truths.aliased_all_gather,
    ),
    _odd(
        "reduce_scatter_tensor_aliased",
        "in place",
        draws={"rows": ROWS},
        variants=each(
            kind=kinds([torch.float32, torch.bfloat16, torch.int64], "whole"), op=("sum", "max")
        ),
    ),
]
"""Outputs that share memory with inputs."""

MESSAGES = [
    _own(programs_messages, name)
    for name in (
        "numbered_messages",
        "messages_in_order",
        "send_buffer_is_free",
        "from_any_rank",
        "batched_messages",
        "waited_out_of_order",
        "futures",
        "futures_together",
        "lists_at_once",
        "object_messages",
        "barriers",
    )
] + [_own(programs_messages, "objects", draws={"root": ROOT})]
"""Point-to-point messages, operations in flight, objects."""

COALESCED = [
    _own(
        programs_messages,
        "coalesced",
        variants=each(what=("all_reduce", "all_gather", "reduce_scatter"), async_ops=(False, True)),
        draws={"device": st.none()},
    ),
    Case(
        name="coalesced on a device",
        program=programs_messages.coalesced,
        variants=each(what=("all_reduce", "all_gather", "reduce_scatter"), async_ops=(False, True)),
        draws={"device": st.just("cpu")},
        truth=truths.coalesced,
        gloo=False,
        why="gloo has no coalescing of its own",
        error="does not implement startCoalescing",
    ),
]
"""The coalescing manager."""

GROUPS = [
    _own(programs_groups, name)
    for name in (
        "overlapping_groups",
        "local_groups",
        "halves",
        "mesh",
        "functional_coalesced",
        "backward",
        "dtensor",
    )
] + [
    _own(
        programs_groups,
        "functional",
        draws={
            "ops": st.permutations(programs_groups.FUNCTIONAL).map(tuple),
            "on_mesh": st.booleans(),
        },
    )
]
"""Subgroups, device meshes, functional collectives, DTensor."""

CASES = {
    case.name: case
    for table in (COLLECTIVES, LAYOUTS, UNEVEN, ALIASED, MESSAGES, COALESCED, GROUPS)
    for case in table
}
"""The suite, by name."""
