"""Rounding to even for Triton kernels, since casts in Triton's interpreter round differently."""

import triton
import triton.language as tl


@triton.jit
def to_even(value, DROPPED: tl.constexpr):
    """Round fp32 to even and clear the last `DROPPED` of 23 mantissa bits. A cast is then exact.

    A GPU's cast already rounds to even. Triton 3.9's interpreter truncates to bf16. If the
    interpreter's cast to FP8 rounds up to a power of two, it may lose the carry, and the result is
    half of the right value.
    """
    bits = value.to(tl.int32, bitcast=True)
    bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    return ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
