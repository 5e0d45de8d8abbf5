"""The cost of attention that PyTorch computes step by step, as the attention pages count it."""

from pytest_aisp import Cost


def attended(elements, scores, width, mask):
    """Return the cost of scores, mask, softmax and the product with the values, in bf16.

    Args:
        elements: numbers of the queries. There are as many keys and values.
        scores: numbers of the scores.
        width: numbers of a head.
        mask: bytes of the mask that come from DRAM.
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
    """Return the cost of one kernel that keeps its scores on the chip.

    Args:
        elements: numbers of the queries. There are as many keys and values.
        scores: numbers of the scores that it computes, masked ones included.
        width: numbers of a head.
        bias: bytes of the bias that it adds to the scores.
    """
    return Cost(
        read=6 * elements + bias,
        write=2 * elements,
        sfu=scores,
        ops={"bf16": 4 * scores * width},
        launches=1,
    )
