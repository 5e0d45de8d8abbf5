"""Casts of Triton kernels that round to even in its interpreter, as they do on a GPU."""

import triton
import triton.language as tl


@triton.jit
def to_even(value, DROPPED: tl.constexpr):
    """Round fp32 without the last `DROPPED` of its 23 bits of mantissa; a cast is then exact.

    A GPU's cast needs no help. Triton 3.9's interpreter cuts bf16 off, and where FP8 rounds up to a
    power of two it may lose the carry, and with it half of the value.
    """
    bits = value.to(tl.int32, bitcast=True)
    bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    return ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
