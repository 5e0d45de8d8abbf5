"""Coalescing: keep the values that are used together next to each other.

Problem    n particles of 8 fp32 fields (position, velocity, mass, charge). Move them along x.
Baseline   array_of_structs: the fields of one particle lie side by side, 32 bytes a particle.
Optimized  struct_of_arrays: the values of one field lie side by side. Operation and shape are the
           same. Only the strides differ.
Bound      DRAM. It moves sectors of 32 bytes, and a particle is exactly one, so reading 2 of its 8
           fields reads all of them. torch loads neighboring values as vectors and strided ones one
           by one. This is not a second cause, because array_of_structs already reads at the DRAM
           rate.
Use when   A kernel reads a few fields of many records. If it reads nearly all of them, there is
           little to gain: moving along all three axes reads 6 of 8. Store the fields apart from
           the start, because a conversion moves more bytes than one such kernel saves.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Work, compare

FIELDS = 8
X, VX = 0, 3
DT = 0.125


def inputs(device, n):
    structs = torch.randn(n, FIELDS, device=device)
    return structs, structs.T.contiguous().T  # the same values and shape, the strides (1, n)


def reference(structs, arrays):
    particles = structs.double()
    return particles[:, X] + DT * particles[:, VX]


def moved(particles):
    return torch.add(particles[:, X], particles[:, VX], alpha=DT)


def array_of_structs(structs, arrays):
    return moved(structs)


def struct_of_arrays(structs, arrays):
    return moved(arrays)


def moving(n, fields):
    return Cost(read=4 * fields * n, write=4 * n, ops={"fp32": 2 * n}, launches=1)


@compare(
    baseline=array_of_structs,
    optimized=[struct_of_arrays],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 1 << 24}],
    check_sizes=[{"n": 1023}, {"n": st.integers(2, 3000)}],
    cpu_sizes=[{"n": 1 << 19}],
    work=lambda n: Work(read=8 * n, write=4 * n, flops={"fp32": 2 * n}, terms=2, roundings=2),
    bound="dram",
    costs={
        array_of_structs: lambda n: moving(n, fields=FIELDS),
        struct_of_arrays: lambda n: moving(n, fields=2),
    },
    at_least={"sm90": 2.3, "cpu": 2.5},
)
def test_aos_soa(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
