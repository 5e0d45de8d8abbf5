"""Make casts round to nearest even in Triton's interpreter, as they do on a GPU."""

import triton
import triton.language as tl


@triton.jit
def to_even(value, DROPPED: tl.constexpr):
    """Round fp32 to nearest even, dropping `DROPPED` of 23 mantissa bits. A cast is then exact.

    A GPU's cast already rounds this way. In Triton 3.9's interpreter, a cast to bf16 truncates. If
    a cast to FP8 rounds up to a power of two, the interpreter may lose the carry and return half of
    the correct value.
    """
    bits = value.to(tl.int32, bitcast=True)
    bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    return ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
