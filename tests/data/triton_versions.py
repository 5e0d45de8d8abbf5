"""Print why sides with changed Triton kernels must be timed, as JSON by the name of the change.

For `SASS`, print the difference of the variant's SASS instead.

Run as a program with a folder for the pages, without Triton's interpreter.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from two_versions import compare_versions, write_files

PAGE = """
import torch
import triton

from pytest_aisp import Work, compare

from .kernels import doubling_kernel, other_kernel, tuned_kernel


def inputs(device, n):
    return (torch.randn(n, device=device),)


def added(x):
    return x + x


def doubled(x):
    out = torch.empty_like(x)
    doubling_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out


@compare(
    baseline=added,
    optimized=[doubled],
    inputs=inputs,
    reference=lambda x: 2 * x.double(),
    sizes=[{"n": 4096}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
    check_sizes=[{"n": 33}],
)
def test_doubling(pair):
    pair.assert_equivalent()
"""
KERNELS = """
import triton
import triton.language as tl


@triton.jit
def twice(value):
    return 2.0 * value


@triton.jit
def doubling_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, twice(tl.load(x + at, mask=at < n)), mask=at < n)


@triton.jit
def other_kernel(x, out):
    tl.store(out, tl.load(x))


@triton.autotune([triton.Config({"BLOCK": 512}), triton.Config({"BLOCK": 1024})], key=["n"])
@triton.jit
def tuned_kernel(x, out, n, BLOCK: tl.constexpr):
    to = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + to, 2 * tl.load(x + to, mask=to < n), mask=to < n)
"""
IMPORT = "from .kernels import doubling_kernel, other_kernel, tuned_kernel"
RENAMED = [("at = ", "where = "), ("+ at", "+ where"), ("=at", "=where")]
LAUNCH = "doubling_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)"
TUNED = (LAUNCH, "tuned_kernel[lambda m: (triton.cdiv(x.numel(), m['BLOCK']),)](x, out, x.numel())")
COUNT = "torch.cuda.get_device_properties(x.device).multi_processor_count"
BLOCK = ("BLOCK=1024", f"BLOCK=1024 if {COUNT} < 200 else 2048")
# What differs from the texts above in both versions, and what only in the new version.
CHANGES = {
    "a local variable": ([], RENAMED),
    "a kernel on the page": ([(IMPORT, KERNELS)], RENAMED),
    "a line": ([], [("    at = ", "\n    where = \\\n"), *RENAMED]),
    "a tuned kernel": ([TUNED], [("to = ", "where = "), ("+ to", "+ where"), ("=to", "=where")]),
    "a function that a kernel calls": (
        [],
        [("2.0 * value", "2.0 * number"), ("(value)", "(number)")],
    ),
    "a constant": ([], [("2.0", "3.0")]),
    "a configuration": ([TUNED], [('"BLOCK": 512', '"BLOCK": 256')]),
    "warps": ([], [("BLOCK=1024)", "BLOCK=1024, num_warps=8)")]),
    "a parameter": ([], [("BLOCK: tl.constexpr", "BLOCK: tl.constexpr = 1")]),
    "a helper of kernels": (
        [],
        [("import triton\n", "import triton\n\ntriton.knobs.refresh_knobs\n")],
    ),
    "an error": ([], [("2.0 * value", "missing * value")]),
    "a kernel that is not launched": (
        [("return out", "return out if x.numel() else other_kernel[(1,)](x, out)")],
        [("tl.load(x))", "tl.load(x) + 1)")],
    ),
    "another GPU": ([BLOCK], RENAMED),
    "torch.compile": ([("import torch\n", "import torch\n# torch.compile\n")], RENAMED),
}
SASS = {
    "the SASS after a line": CHANGES["a line"],
    "the SASS after a configuration": ([TUNED], [('"BLOCK": 1024', '"BLOCK": 2048')]),
}


def why_timed(folder, name, before, after, sass=""):
    page = f"ch{name}/triton_test.py"

    def write(tree, edits):
        files = {page: PAGE, f"ch{name}/kernels.py": KERNELS}
        for old, new in edits:
            files = {file: text.replace(old, new) for file, text in files.items()}
        return write_files(folder / f"{tree}{name}", files)

    trees = write("then", before), write("now", [*before, *after])
    result = compare_versions(*trees, page, size={"n": 4096}, arch="sm90", sass=sass)
    if sass:
        return {sass: result.sass}
    return {role: result.why_timed.get(role) for role in result.roles()}


if __name__ == "__main__":
    found = {
        name: why_timed(Path(sys.argv[1]), number, *change, "optimized" if name in SASS else "")
        for number, (name, change) in enumerate({**CHANGES, **SASS}.items())
    }
    print(json.dumps(found))
