"""Costs of the decoder in `transformer.py`: the kernels of eager forward and backward passes.

Traffic is counted in units. A unit is one tensor of (tokens, width) values. `hidden` is the hidden
width divided by the width, about 8/3. An eager operation is one kernel, which reads its inputs and
writes its outputs. About 8 units of temporaries exist at a time. If the temporaries fit in the L2,
only the activations that are kept for the backward pass count as DRAM traffic.
"""

from pytest_aisp import Cost

from .transformer import HEAD, VOCABULARY, hidden_of

L2 = 50e6
TEMPORARIES = 8


def layers(count, width, tokens, length, element=2, arithmetic="bf16"):
    """Return the cost of the forward and backward passes of `count` blocks."""
    size = width, tokens, length, element, arithmetic
    return count * (forward(*size) + backward(*size))


def forward(width, tokens, length, element=2, arithmetic="bf16"):
    """Return the cost of a block's forward pass."""
    return (
        linear_forward(width, tokens, element, arithmetic)
        + attention_forward(width, tokens, length, element, arithmetic)
        + pointwise_forward(width, tokens, element)
    )


def backward(width, tokens, length, element=2, arithmetic="bf16"):
    """Return the cost of a block's backward pass."""
    return (
        linear_backward(width, tokens, element, arithmetic)
        + attention_backward(width, tokens, length, element, arithmetic)
        + pointwise_backward(width, tokens, element)
    )


def matrices(width):
    """Return the number of weights in the five linear layers of a block."""
    return (4 * width + 3 * hidden_of(width)) * width


def linear_forward(width, tokens, element, arithmetic):
    inputs = 4 * width + hidden_of(width)
    outputs = 5 * width + 2 * hidden_of(width)
    return Cost(
        read=element * (matrices(width) + tokens * inputs),
        write=element * tokens * outputs,
        ops={arithmetic: 2 * tokens * matrices(width)},
        launches=5,
    )


def linear_backward(width, tokens, element, arithmetic):
    """Return the cost of two matrix products for each product of the forward pass."""
    inputs = 4 * width + hidden_of(width)
    outputs = 5 * width + 2 * hidden_of(width)
    return Cost(
        read=element * (matrices(width) + tokens * (inputs + 2 * outputs)),
        write=element * (matrices(width) + tokens * inputs),
        ops={arithmetic: 4 * tokens * matrices(width)},
        launches=10,
    )


def attention_forward(width, tokens, length, element, arithmetic):
    """Return the cost of two matrix products. The causal mask halves their operations."""
    return Cost(
        read=3 * element * tokens * width,
        write=element * tokens * width,
        ops={arithmetic: 2 * tokens * length * width},
        sfu=tokens * length * width / HEAD / 2,
        launches=1,
    )


def attention_backward(width, tokens, length, element, arithmetic):
    """Return the cost of five matrix products, because the scores are computed again."""
    return Cost(
        read=8 * element * tokens * width,
        write=6 * element * tokens * width,
        ops={arithmetic: 5 * tokens * length * width},
        sfu=tokens * length * width / HEAD / 2,
        launches=4,
    )


def traffic(unit, read, write, kept_read, kept_write, launches):
    """Return the cost of pointwise kernels.

    Args:
        unit: bytes of a unit.
        read, write: units that the kernels read and write.
        kept_read, kept_write: how many of these units are activations kept for the backward pass.
        launches: number of kernels.
    """
    if TEMPORARIES * unit > L2:
        return Cost(read=read * unit, write=write * unit, launches=launches)
    return Cost(
        l2=(read + write) * unit,
        read=kept_read * unit,
        write=kept_write * unit,
        launches=launches,
    )


def pointwise_forward(width, tokens, element):
    hidden = hidden_of(width) / width
    return traffic(
        element * tokens * width,
        read=2 + 10 + 1 + 4 + 3 * hidden,  # norms, rotation, heads, sums, SwiGLU
        write=2 + 8 + 1 + 2 + 2 * hidden,
        kept_read=0,
        kept_write=7 + 2 * hidden,
        launches=2 + 14 + 1 + 2 + 2,
    )


def pointwise_backward(width, tokens, element):
    hidden = hidden_of(width) / width
    return traffic(
        element * tokens * width,
        # Terms, in order: sums of gradients, norms, rotation, concatenation of q, k, v, SwiGLU.
        read=6 + 8 + 11 + 3 + 6 * hidden,
        write=3 + 2 + 9 + 3 + 3 * hidden,
        kept_read=4 + 3 * hidden,
        kept_write=0,
        launches=3 + 4 + 16 + 1 + 3,
    )


def ends(width, tokens, element=2, arithmetic="bf16"):
    """Return the cost of embedding, last norm, head and loss, in both passes."""
    head = VOCABULARY * width
    product = Cost(
        read=3 * element * (tokens * width + head),
        write=element * (tokens * width + 2 * head),
        ops={arithmetic: 6 * tokens * head},
        launches=3,
    )
    unit = element * tokens * width
    return product + Cost(read=6 * unit, write=3 * unit, launches=20)
