"""Coalescing: store values next to each other if they are used together.

Problem    Compute the new positions along x of n particles. A particle has 8 fp32 fields (position,
           velocity, mass, charge).
Baseline   array_of_structs: the fields of one particle are next to each other in memory, 32 bytes
           per particle.
Optimized  struct_of_arrays: the values of one field are next to each other. Only the strides
           change.
Bound      DRAM, which moves sectors of 32 bytes. A particle fills exactly one sector, so reading 2
           of its 8 fields moves all 8. torch loads neighboring values as vectors, and strided
           values one by one. Vector loads add nothing to the gain, because `array_of_structs`
           already reads at the DRAM rate.
Use when   A kernel reads a few fields of many records. If it reads nearly all fields, there is
           little to gain. For example, new positions along all three axes need 6 of the 8 fields.
           Create the data as a struct of arrays, because a later conversion moves more bytes than
           one such kernel saves.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Work, compare

FIELDS = 8
X, VX = 0, 3
DT = 0.125


def inputs(device, n):
    structs = torch.randn(n, FIELDS, device=device)
    return structs, structs.T.contiguous().T  # the same values and shape, with strides (1, n)


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
