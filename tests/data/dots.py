"""Print what Triton makes of a matrix product on each arch: its instructions, by feature, as JSON.

Run as a program, without Triton's interpreter.
"""

import json

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pytest_aisp.kernels import sass
from pytest_aisp.page.gpu_specs import GPU_ARCHS


@triton.jit
def plain(a, b, c):
    i = tl.arange(0, 128)
    x, y = tl.load(a + i[:, None] * 128 + i), tl.load(b + i[:, None] * 128 + i)
    tl.store(c + i[:, None] * 128 + i, tl.dot(x, y))


@triton.jit
def scaled(a, b, c, scale):
    i, four = tl.arange(0, 128), tl.arange(0, 4)
    x, y = tl.load(a + i[:, None] * 128 + i), tl.load(b + i[:, None] * 128 + i)
    s = tl.load(scale + i[:, None] * 4 + four)
    tl.store(c + i[:, None] * 128 + i, tl.dot_scaled(x, s, "e4m3", y, s, "e4m3"))


def instructions(kernel, arch, element):
    signature = {"a": element, "b": element, "c": "*fp32", "scale": "*u8"}
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, {})
    target = GPUTarget("cuda", int(arch.removeprefix("sm")), 32)
    (held,) = sass.instructions(triton.compile(source, target).asm["cubin"]).values()
    return sorted(held)


if __name__ == "__main__":
    dots = {arch: instructions(plain, arch, "*fp16") for arch in GPU_ARCHS}
    blocks = {arch: instructions(scaled, arch, "*fp8e4nv") for arch in GPU_ARCHS}
    print(json.dumps({"wgmma": dots, "tcgen05": dots, "mma_block_scale": blocks}))
