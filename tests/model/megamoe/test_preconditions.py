"""Each precondition of a launch: its line, and that what lies just within it passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.megamoe import deep_gemm
from model.megamoe.preconditions import PreconditionError
from sim import RankContext, RankFailed, World

EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 8, 4, 256, 128, 3
FORMS = {"bf16": "bf16xbf16", "mxfp8": "fp8xfp8"}


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class Launch:
    """A correct launch on the default group, to be spoiled in one place."""

    def __init__(self, form: str, **sizes: Any) -> None:
        self.form = form
        arguments: dict[str, Any] = {
            "num_experts": EXPERTS,
            "num_max_tokens_per_rank": 10,
            "num_topk": TOP_K,
            "hidden": HIDDEN,
            "intermediate_hidden": WIDTH,
            "mma_type": FORMS.get(form, form),
        } | sizes
        self.buffer = deep_gemm.get_symm_buffer_for_mega_moe(_world(), **arguments)
        local = self.buffer.num_experts // dist.get_world_size()
        self.l1: Any = self._weights(local, 2 * self.buffer.intermediate_hidden, self.buffer.hidden)
        self.l2: Any = self._weights(local, self.buffer.hidden, self.buffer.intermediate_hidden)
        self.buffer.topk_idx[:TOKENS] = torch.arange(self.buffer.num_topk)
        self.y = torch.empty(TOKENS, self.buffer.hidden, dtype=torch.bfloat16)
        self.options: dict[str, Any] = {}

    def _weights(self, *shape: int) -> Any:
        if self.form == "bf16":
            return torch.zeros(shape, dtype=torch.bfloat16)
        local, rows, columns = shape
        scales = torch.zeros(local, columns // 128, rows, dtype=torch.int32).transpose(1, 2)
        return torch.zeros(shape, dtype=torch.float8_e4m3fn), scales

    def go(self) -> None:
        kernel = deep_gemm.bf16_mega_moe if self.form == "bf16" else deep_gemm.fp8_fp4_mega_moe
        kernel(self.y, self.l1, self.l2, self.buffer, **self.options)


Spoil = Callable[[Launch], None]


def run(program: Callable[[RankContext], object], word: str = "tep2") -> None:
    with World(word) as world:
        try:
            world.run(program)
        except RankFailed as failed:
            assert failed.__cause__ is not None
            raise failed.__cause__ from None


def spoiled(form: str, spoil: Spoil) -> None:
    def program(ctx: RankContext) -> None:
        launch = Launch(form)
        spoil(launch)
        launch.go()

    run(program)


def set_to(**values: Any) -> Spoil:
    def spoil(launch: Launch) -> None:
        for name, value in values.items():
            setattr(launch, name, value(launch) if callable(value) else value)

    return spoil


def route(token: int, slot: int, expert: int) -> Spoil:
    def spoil(launch: Launch) -> None:
        launch.buffer.topk_idx[token, slot] = expert

    return spoil


def scales(change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    return set_to(l1=lambda launch: (launch.l1[0], change(launch.l1[1])))


@pytest.mark.parametrize("form", FORMS)
def test_a_correct_launch_passes(form: str) -> None:
    spoiled(form, lambda launch: None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (
            set_to(y=torch.empty(TOKENS, 2, HIDDEN, dtype=torch.bfloat16)),
            r"y is \[3, 2, 256\]; it must be \[tokens, hidden size 256\]",
        ),
        (
            set_to(y=torch.empty(TOKENS, 128, dtype=torch.bfloat16)),
            r"y is \[3, 128\]; it must be \[tokens, hidden size 256\]",
        ),
        (set_to(y=torch.empty(TOKENS, HIDDEN)), "y is float32; it must be bfloat16"),
        (
            set_to(y=torch.empty(HIDDEN, TOKENS, dtype=torch.bfloat16).T),
            r"y has strides \(1, 3\); it must be contiguous",
        ),
        (
            set_to(y=torch.empty(1921, HIDDEN, dtype=torch.bfloat16)),
            "1921 tokens on this rank; the symmetric buffer has room for 1920",
        ),
        (route(2, 1, EXPERTS), "token 2, slot 1: expert id 8; ids are 0 to 7, or -1 for none"),
        (route(0, 3, -2), "token 0, slot 3: expert id -2; ids are 0 to 7, or -1 for none"),
        (route(1, 3, 2), "token 1 chooses expert 2 twice; its experts must differ"),
        (
            set_to(options={"activation_clamp": -1.0}),
            "activation clamp -1.0, alpha 1.0, beta 0.0: the clamp must be 0 or more, alpha and "
            "beta finite",
        ),
        (
            set_to(options={"cumulative_local_expert_recv_stats": torch.zeros(8)}),
            r"statistics are float32 \[8\]; they must be int32 \[4\]",
        ),
        (set_to(options={"activation_alpha": float("nan")}), "alpha nan, .* alpha and beta finite"),
        (set_to(options={"activation_beta": float("inf")}), "beta inf: .* alpha and beta finite"),
    ],
)
def test_a_breach_is_one_line(form: str, spoil: Spoil, line: str) -> None:
    with pytest.raises(PreconditionError, match=line) as caught:
        spoiled(form, spoil)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "spoil", "line"),
    [
        (
            "bf16",
            set_to(l1=lambda launch: launch.l1.float()),
            "l1 weights are float32; a buffer for bf16xbf16 goes with bfloat16",
        ),
        (
            "bf16",
            set_to(l2=lambda launch: launch.l2[:2].clone()),
            r"l2 weights are \[2, 256, 128\]; a buffer for 8 experts over 2 ranks goes with "
            r"\[4, 256, 128\]",
        ),
        (
            "bf16",
            set_to(l2=lambda launch: launch.l2.transpose(1, 2).contiguous().transpose(1, 2)),
            r"l2 weights have strides \(32768, 1, 256\); they must be contiguous",
        ),
        (
            "bf16",
            set_to(l1=lambda launch: (launch.l1, None)),
            "l1 weights come with scales; a buffer for bf16xbf16 takes them without",
        ),
        (
            "mxfp8",
            set_to(l2=lambda launch: launch.l2[0]),
            "l2 weights come without scales; a buffer for fp8xfp8 takes them with",
        ),
        (
            "mxfp8",
            scales(lambda sf: sf.to(torch.int64)),
            r"l1 scales are int64 \[4, 256, 2\]; they must be int32 \[4, 256, 2\], four",
        ),
        (
            "mxfp8",
            scales(lambda sf: sf.contiguous()),
            r"l1 scales have strides \(512, 2, 1\); rows must be innermost: \(512, 1, 256\)",
        ),
        (
            "mxfp8",
            set_to(options={"recipe": (1, 1, 128)}),
            r"recipe \(1, 1, 128\): scales are of 1 x 32 blocks",
        ),
    ],
)
def test_weights_of_another_make_are_one_line(form: str, spoil: Spoil, line: str) -> None:
    with pytest.raises(PreconditionError, match=line) as caught:
        spoiled(form, spoil)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        # What vLLM's own check lets through, and the kernel's does not.
        ({"hidden": 128}, "hidden size 128: MegaMoE takes multiples of 256"),
        ({"hidden": 0}, "hidden size 0: MegaMoE takes multiples of 256"),
        ({"intermediate_hidden": 64}, "expert width 64: MegaMoE takes multiples of 128"),
        ({"num_experts": 9}, "9 experts do not divide over the 2 ranks of the buffer's group"),
        ({"num_topk": 9}, "top-k 9: MegaMoE takes 1 to 8 experts a token here"),
        ({"num_topk": 0}, "top-k 0: MegaMoE takes 1 to 8 experts a token here"),
        (
            {"num_topk": 33, "num_experts": 64},
            "top-k 33: MegaMoE takes 1 to 32 experts a token here",
        ),
        ({"num_max_tokens_per_rank": 0}, "a buffer for 0 tokens a rank; it needs room for one"),
    ],
)
def test_sizes_that_the_kernel_cannot_take_are_one_line(
    form: str, sizes: dict[str, int], line: str
) -> None:
    with pytest.raises(PreconditionError, match=line) as caught:
        run(lambda ctx: Launch(form, **sizes))
    assert "\n" not in str(caught.value)


def test_sizes_at_the_limits_pass() -> None:
    def program(ctx: RankContext) -> None:
        launch = Launch("bf16", hidden=512, intermediate_hidden=384, num_topk=8)
        launch.y = torch.ones(1920, 512, dtype=torch.bfloat16)
        launch.buffer.topk_idx[:] = -1
        launch.go()
        assert not launch.y.any()

    run(program)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Launch("fp8xfp4"), "bf16xbf16 and fp8xfp8 .*, not fp8xfp4; use bf16 or mxfp8"),
        (lambda: Launch("bf16", activation="situ"), "the activation swiglu, not situ"),
        (lambda: Launch("bf16", num_shared_experts=1), "no shared expert inside the launch"),
        (lambda: deep_gemm.NVFP4SymmBuffer(1, 2), "fp8xfp8 .*, not nvfp4; use bf16 or mxfp8"),
        (lambda: deep_gemm.nvfp4_mega_moe(), "not nvfp4; use bf16 or mxfp8"),
        (
            lambda: deep_gemm.get_block_m_for_mega_moe(2, 8, 1920, 1, 2, "fp8xfp8"),
            "no shared expert inside the launch; run it beside the launch",
        ),
    ],
)
def test_what_is_not_computed_is_one_line(make: Callable[[], Any], line: str) -> None:
    with pytest.raises(NotImplementedError, match=line) as caught:
        run(lambda ctx: make())
    assert "\n" not in str(caught.value)


def test_experts_count_the_rows_that_they_received() -> None:
    seen = {}

    def program(ctx: RankContext) -> None:
        launch = Launch("bf16")
        launch.buffer.topk_idx[0, 0] = -1
        stats = torch.full((EXPERTS // 2,), 100, dtype=torch.int32)
        launch.options = {"cumulative_local_expert_recv_stats": stats}
        launch.go()
        seen[ctx.rank] = (stats - 100).tolist()

    run(program)
    assert seen == {0: [4, 6, 6, 6], 1: [0, 0, 0, 0]}
