"""AdamW with moments in 8 bits: a quarter of the optimizer's memory, and less memory traffic.

Problem    Take one AdamW step of `n` fp32 parameters. The initial parameters are about as large as
           one update, so that an error in the update is visible in the parameter.
Baseline   library: fused `torch.optim.AdamW`, which keeps two fp32 moments, 8 bytes per parameter.
           A step reads parameter, gradient and moments, and writes parameter and moments, which
           takes 28 bytes per parameter.
Optimized  fp32_moments: changes `library`. A Triton kernel of this page moves the same bytes, so
           the variant shows the effect of the kernel without 8-bit moments.
           eight_bits: changes `fp32_moments`. The kernel decodes 8-bit moments, updates them and
           encodes them again. Each group of 256 encoded values shares one fp32 scale (block-wise
           quantization, Dettmers et al., arXiv:2110.02861). Per parameter, the moments take 2.03
           bytes, and a step moves 16.06 bytes.
Bound      DRAM. Decoding and encoding take 68 instructions per parameter, counted with nvdisasm for
           sm90. The instructions take less time than the memory traffic, and overlap with it.
Seen       On an H200, `fp32_moments` is about a sixth faster than `library`, although both move the
           same bytes. `fp32_moments` and `eight_bits` take about as long as their memory traffic
           should take. `library` takes a fifth longer. The cause was not measured. So less than a
           third of the time that `eight_bits` saves comes from the kernel. The smaller moments save
           the rest.
Use when   The moments do not fit next to the model, or the optimizer's step is a visible part of a
           training step. Do not use 8-bit moments if a run must match fp32 AdamW: the check on this
           page allows errors as large as the rounding errors of int8.
"""

import functools
import math
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

# 1 - beta is exact in fp32 (see ch01/optimizer_test.py). The second beta is near 0.95, a common
# value for language models. There is no weight decay, because it would hardly change such small
# parameters.
LR, BETAS, EPS = 2**-8, (1 - 2**-3, 1 - 2**-4), 1e-8
GROUP, GROUPS = 256, 16  # parameters per scale, and scales per program
# Codes are logarithmic: they cover 25 octaves (factors of 2) below the largest value of the group.
# The error of linear codes is proportional to the largest value. For small gradients, that error
# would be too large, because the update divides by a small root. The code of the second moment
# stores the moment's square root in 10 steps per octave. The code of the first moment has a sign
# bit and 5 steps per octave.
STEPS_AN_OCTAVE = 10


def state(device, n):
    parameters = torch.nn.Parameter(LR * torch.randn(n, device=device))
    optimizer = torch.optim.AdamW(
        [parameters], LR, BETAS, EPS, 0.0, fused=True, capturable=device == "cuda"
    )
    step = torch.zeros((), device=device)
    return SimpleNamespace(parameters=parameters, optimizer=optimizer, step=step, codes={})


def inputs(device, n):
    return (torch.randn(n, device=device),)


def reference(state, gradient):
    g = gradient.double()
    zeros = torch.zeros_like(g)
    t, m, v = getattr(state, "moments", (0, zeros, zeros))
    t, m, v = t + 1, m.lerp(g, 1 - BETAS[0]), v.lerp(g.square(), 1 - BETAS[1])
    m_hat, v_hat = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
    state.parameters = state.parameters.detach().double() - LR * m_hat / (v_hat.sqrt() + EPS)
    state.moments = t, m, v
    state.step = state.step + 1


def library(state, gradient):
    state.step += 1
    state.parameters.grad = gradient
    state.optimizer.step()
    state.parameters.grad = None


@triton.jit
def adamw_fp32_kernel(
    parameters, gradient, first, second, step, n,
    LR: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    p = tl.load(parameters + at, mask=here)
    g = tl.load(gradient + at, mask=here, other=0.0)
    m = BETA1 * tl.load(first + at, mask=here, other=0.0) + (1 - BETA1) * g
    v = BETA2 * tl.load(second + at, mask=here, other=0.0) + (1 - BETA2) * g * g
    t = tl.load(step).to(tl.float64)  # float64, because 1 - beta**t loses digits
    m_hat = m * (1 / (1 - tl.exp2(t * LOG_BETA1))).to(tl.float32)
    v_hat = v * (1 / (1 - tl.exp2(t * LOG_BETA2))).to(tl.float32)
    tl.store(parameters + at, p - LR * m_hat / (tl.sqrt(v_hat) + EPS), mask=here)
    tl.store(first + at, m, mask=here)
    tl.store(second + at, v, mask=here)


def fp32_moments(state, gradient):
    n, block = gradient.numel(), GROUP * GROUPS
    state.step += 1
    if not state.codes:
        state.codes = {name: torch.zeros_like(gradient) for name in ("m", "v")}
    adamw_fp32_kernel[(triton.cdiv(n, block),)](
        state.parameters, gradient, *state.codes.values(), state.step, n,
        LR=LR, BETA1=BETAS[0], BETA2=BETAS[1], EPS=EPS,
        LOG_BETA1=math.log2(BETAS[0]), LOG_BETA2=math.log2(BETAS[1]), BLOCK=block,
    )  # fmt: skip


@triton.jit
def octaves_of(x, APPROXIMATE: tl.constexpr):
    """Return log2(x). APPROXIMATE takes 1 instruction (error 2^-22). Triton's log2 takes 25."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def adamw_kernel(
    parameters, gradient, m_codes, m_scales, v_codes, v_scales, step, n,
    APPROXIMATE: tl.constexpr,
    LR: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, STEPS_AN_OCTAVE: tl.constexpr,
):  # fmt: skip
    groups = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    here, known = at < n, groups * GROUP < n
    p = tl.load(parameters + at, mask=here)
    g = tl.load(gradient + at, mask=here, other=0.0)
    code = tl.load(m_codes + at, mask=here, other=0).to(tl.float32)
    largest = tl.load(m_scales + groups, mask=known, other=0.0)[:, None]
    size = largest * tl.exp2((tl.abs(code) - 127.0) / (STEPS_AN_OCTAVE // 2))
    m = tl.where(code < 0, -size, size)
    code = tl.load(v_codes + at, mask=here, other=0).to(tl.float32)
    largest = tl.load(v_scales + groups, mask=known, other=0.0)[:, None]
    root = largest * tl.exp2((code - 255.0) / STEPS_AN_OCTAVE)

    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * root * root + (1 - BETA2) * g * g
    t = tl.load(step)
    m_hat = m * (1 / (1 - tl.exp2(t * LOG_BETA1)))
    v_hat = v * (1 / (1 - tl.exp2(t * LOG_BETA2)))
    tl.store(parameters + at, p - LR * m_hat / (tl.sqrt(v_hat) + EPS), mask=here)

    # The lower limit avoids a division by zero if a whole group is zero.
    size = tl.maximum(tl.abs(m), 1e-37)
    largest = tl.max(size, axis=1)
    octaves = octaves_of(size * (1 / largest)[:, None], APPROXIMATE)
    code = tl.maximum(127.5 + STEPS_AN_OCTAVE // 2 * octaves, 1.0)
    code = tl.floor(code).to(tl.int8)
    tl.store(m_codes + at, tl.where(m < 0, -code, code), mask=here)
    tl.store(m_scales + groups, largest, mask=known)
    root = tl.maximum(tl.sqrt(v), 1e-37)
    largest = tl.max(root, axis=1)
    octaves = octaves_of(root * (1 / largest)[:, None], APPROXIMATE)
    code = tl.maximum(255.5 + STEPS_AN_OCTAVE * octaves, 0.0)
    tl.store(v_codes + at, code.to(tl.uint8), mask=here)
    tl.store(v_scales + groups, largest, mask=known)


def eight_bits(state, gradient):
    n = gradient.numel()
    state.step += 1
    if not state.codes:
        make = {"device": gradient.device}
        scales = triton.cdiv(n, GROUP)
        state.codes = {
            "m": torch.zeros(n, dtype=torch.int8, **make),
            "m scales": torch.zeros(scales, **make),
            "v": torch.zeros(n, dtype=torch.uint8, **make),
            "v scales": torch.zeros(scales, **make),
        }
    adamw_kernel[(triton.cdiv(n, GROUP * GROUPS),)](
        state.parameters, gradient, *state.codes.values(), state.step, n,
        APPROXIMATE=gradient.is_cuda,
        LR=LR, BETA1=BETAS[0], BETA2=BETAS[1], EPS=EPS,
        LOG_BETA1=math.log2(BETAS[0]), LOG_BETA2=math.log2(BETAS[1]),
        GROUP=GROUP, GROUPS=GROUPS, STEPS_AN_OCTAVE=STEPS_AN_OCTAVE,
    )  # fmt: skip


CHUNKS = 320 * 65536  # parameters per launch of the fused optimizer


def updated(n, moments, launches, sfu):
    """Return the cost of a step that reads and writes `moments` bytes of moments per parameter."""
    update = Cost(read=(8 + moments) * n, write=(4 + moments) * n, sfu=sfu * n, launches=launches)
    return Cost(launches=1) + update


def work(n):
    # Only the moments are rounded to 8 bits.
    return Work(read=(8 + 2 + 8 / GROUP) * n, write=(4 + 2 + 8 / GROUP) * n, roundings=2)


against_library = functools.partial(
    compare,
    baseline=library,
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 1 << 27}],
    check_sizes=[{"n": 10007}],
    work=work,
    bound="dram",
)


def library_cost(n):
    # The fused optimizer also increments a step counter, which takes one more launch.
    return updated(n, moments=8, launches=1 + math.ceil(n / CHUNKS), sfu=2)


# A code may be off by half a step, which is 15 % of the first moment and 7 % of the root of the
# second. The first update starts from exact zeros, so it has no such error. The third update has
# the errors that the first two updates left in the moments. The check allows 2^-6 per rounding to
# int8 (docs/explanation/checking.md). With two roundings per step, it allows 3.1 % of the change of
# a parameter after 3 steps.
@against_library(
    optimized=[Variant(eight_bits, precision="int8", at_least={"sm90": 1.6})],
    costs={
        library: library_cost,
        eight_bits: lambda n: updated(n, moments=2 + 8 / GROUP, launches=1, sfu=7),
    },
)
def test_optimizer_8bit(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.3)


@against_library(
    optimized=[Variant(fp32_moments, at_least="yardstick")],
    costs={
        library: library_cost,
        fp32_moments: lambda n: updated(n, moments=8, launches=1, sfu=2),
    },
)
def test_optimizer_of_the_page(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
