"""Half storage: convert bf16 in registers, and move several elements per access.

Problem    Compute SiLU of n bf16 elements in fp32, and round the result to bf16 once. The input and
           the result are bf16 on all sides.
Baseline   widened: an fp32 kernel between two conversions, `x.float()` and `.bfloat16()`. Two fp32
           tensors pass through DRAM.
Optimized  in_registers: changes `widened`. One kernel loads bf16, computes in fp32, and stores
           bf16, one element per thread.
           pairs: changes `in_registers`. A thread has two elements, in 4-byte accesses.
           octets: changes `in_registers`. A thread has eight elements, in 16-byte accesses.
           library: `torch.nn.functional.silu`, which also computes in fp32.
Bound      DRAM limits `octets`, which reads 2 bytes and writes 2 bytes per element, while `widened`
           moves 20. Block starts limit `in_registers`, which starts a block for every 256 elements.
           These starts alone take more than twice as long as its DRAM traffic. `pairs` starts half
           as many blocks as `in_registers`, and `octets` starts an eighth. The bytes in flight
           limit too (`../ch07/vector_width_test.py`): the 2048 threads of an SM have 4 KiB of loads
           in flight in `in_registers`, 8 KiB in `pairs` and 32 KiB in `octets`. By the costs, 8 KiB
           in flight and the block starts of `pairs` take about the same time.
Seen       `pairs` has as many threads, blocks and 4-byte accesses as `single` of `ilp_test.py`, and
           takes about as long. So `pairs` is not slow because of bf16. It is slow for the same two
           reasons as `single`: too few bytes in flight and too many block starts. `pairs` takes
           longer than predicted, probably because the two overlap only partly. The cost assumes
           that they overlap completely. `in_turn` of `ilp_test.py` has as many bytes in flight but
           a quarter of the blocks, and takes about as long as the bytes in flight predict.
           `widened` takes longer than predicted, and we did not measure its three kernels
           separately. The middle kernel makes twice as many accesses as `single`. If it also takes
           twice as long, the two conversions take 1.5 times as long as predicted from their bytes.
           We cannot explain why.
Use when   Tensors have 16-bit elements, and arithmetic needs 32 bits. Do not convert a whole tensor
           for one elementwise kernel. Load at least 16 bytes per thread. Keep sums and exponentials
           in fp32.
"""

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("half_storage.cu")
BLOCK = 256
THREADS = 2048  # threads that an SM runs at once, for costs


def inputs(device, n):
    return (torch.randn(n, device=device, dtype=torch.bfloat16),)


def reference(x):
    x = x.double()
    return x / (1 + torch.exp(-x))


def launch(kernel, x, each):
    out = torch.empty_like(x)
    kernel[-(-x.numel() // (each * BLOCK)), BLOCK](x, out, x.numel())
    return out


def widened(x):
    return launch(kernels.in_fp32, x.float(), each=1).bfloat16()


def in_registers(x):
    return launch(kernels.in_registers, x, each=1)


def pairs(x):
    return launch(kernels.pairs, x, each=2)


def octets(x):
    return launch(kernels.octets, x, each=8)


def library(x):
    return F.silu(x)


def squashed(n, instructions, each, size=2):
    """Return the cost of one kernel.

    Args:
        instructions: instructions per element, counted in the machine code for sm_90. An
            instruction takes the issue slot of a multiply-add.
        each: elements per thread.
        size: the bytes of an element.
    """
    ops, blocks = {"fp32": 2 * instructions * n}, -(-n // (each * BLOCK))
    return Cost(
        read=size * n,
        write=size * n,
        in_flight=size * each * THREADS,
        sfu=2 * n,
        ops=ops,
        blocks=blocks,
        launches=1,
    )


def converted_twice(n):
    longer = Cost(read=2 * n, write=4 * n, launches=1)
    shorter = Cost(read=4 * n, write=2 * n, launches=1)
    return longer + squashed(n, instructions=30, each=1, size=4) + shorter


@compare(
    baseline=widened,
    optimized=[
        Variant(in_registers, at_least={"sm90": 2.2}),
        Variant(pairs, at_least={"sm90": 3.8}),
        Variant(octets, sass=("LDG.128", "STG.128"), at_least={"sm90": 6.5}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**28}],
    # A block of octets has 2048 elements. At the end, 1 to 7 elements may not fill a 16-byte
    # vector.
    check_sizes=[{"n": 1023}, {"n": 2053}, {"n": st.integers(1, 5000)}],
    work=lambda n: Work(read=2 * n, write=2 * n),
    bound="dram",
    costs={
        widened: converted_twice,
        in_registers: lambda n: squashed(n, instructions=32, each=1),
        pairs: lambda n: squashed(n, instructions=28, each=2),
        # The library's kernel resembles octets, so assume the same cost.
        **dict.fromkeys([octets, library], lambda n: squashed(n, instructions=18, each=8)),
    },
)
def test_half_storage(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
