"""Costs of attention for the attention pages: one kernel per step, and one fused kernel."""

from pytest_aisp import Cost


def attended(elements, scores, width, mask):
    """Return the cost of unfused bf16 attention: scores, mask, softmax, product with the values.

    Args:
        elements: elements of the query tensor. Keys and values each have as many elements.
        scores: elements of the score tensor.
        width: elements per head.
        mask: bytes of the mask that are read from DRAM.
    """
    product = {"bf16": 2 * scores * width}
    return (
        Cost(read=2 * elements, write=2 * elements, launches=1)  # scale the queries
        + Cost(read=4 * elements, write=2 * scores, ops=product, launches=1)
        + Cost(read=2 * scores, write=2 * scores, launches=1)  # masked_fill copies the scores first
        + Cost(read=2 * scores + mask, write=2 * scores, launches=1)
        + Cost(read=2 * scores, write=4 * scores, launches=1)  # softmax converts bf16 to fp32 first
        + Cost(read=4 * scores, write=4 * scores, sfu=scores, launches=1)
        + Cost(read=4 * scores, write=2 * scores, launches=1)  # round to bf16
        + Cost(read=2 * scores + 2 * elements, write=2 * elements, ops=product, launches=1)
    )


def fused(elements, scores, width, bias=0):
    """Return the cost of one fused kernel, which does not write the scores to DRAM.

    Args:
        elements: elements of the query tensor. Keys and values each have as many elements.
        scores: number of scores that the kernel computes, including masked ones.
        width: elements per head.
        bias: bytes of the bias that the kernel adds to the scores.
    """
    return Cost(
        read=6 * elements + bias,
        write=2 * elements,
        sfu=scores,
        ops={"bf16": 4 * scores * width},
        launches=1,
    )
