"""Casts of Triton kernels that round to even in its interpreter, as they do on a GPU."""

import triton
import triton.language as tl


@triton.jit
def to_even(value, DROPPED: tl.constexpr):
    """Round fp32 to even, without the last `DROPPED` mantissa bits of 23. A cast is then exact.

    A GPU's cast already rounds to even. Triton 3.9's interpreter truncates to bf16. When it rounds
    up to a power of two in FP8, it may lose the carry, and then the result is half of the value.
    """
    bits = value.to(tl.int32, bitcast=True)
    bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    return ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
