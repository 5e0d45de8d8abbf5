"""Every error that a page of suites/ raises for bad input, with its whole message."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import errno
import importlib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
INT32 = torch.int32


def bf16(*shape):
    return torch.ones(shape, dtype=torch.bfloat16)


def ints(*shape):
    return torch.zeros(shape, dtype=INT32)


def fake_driver(patch, **functions):
    """Let a page find a driver of which each function returns a status with this name."""
    info = SimpleNamespace(result=SimpleNamespace(name="CU_GRAPH_EXEC_UPDATE_ERROR"))
    results = {
        name: lambda *ignored, status=status: (SimpleNamespace(value=1, name=status), info)
        for name, status in functions.items()
    }
    same = {name: lambda handle: handle for name in ("CUgraphExec", "CUgraph")}
    patch.setitem(sys.modules, "cuda.bindings.driver", SimpleNamespace(**same, **results))


def no_set_aside(page, patch):
    attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE=0)
    status = SimpleNamespace(value=0)
    driver = SimpleNamespace(
        CUdevice_attribute=attribute, cuDeviceGetAttribute=lambda *ignored: (status, 0)
    )
    patch.setitem(sys.modules, "cuda.bindings.driver", driver)
    page.persist(0, 0, 1024, 0)


def driver_error(page, patch):
    fake_driver(patch, cuCtxSetLimit="CUDA_ERROR_UNSUPPORTED_LIMIT")
    page.driver_call("cuCtxSetLimit", 0, 0)


def managed_error(page, patch):
    fake_driver(patch, cuMemFree="CUDA_ERROR_INVALID_VALUE")
    page.Managed.call(None, "cuMemFree", 0)


def graph_update_error(page, patch):
    fake_driver(patch, cuGraphExecUpdate="CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE")
    recorder = object.__new__(page.Recorder)
    recorder.first = SimpleNamespace(raw_cuda_graph_exec=int, raw_cuda_graph=int)
    recorder.record = lambda step: (recorder.first, None)
    recorder.replay_updated(lambda: None)


def forbidden_binding(page, patch):
    def syscall(*ignored):
        ctypes.set_errno(errno.EPERM)
        return -1

    patch.setattr(ctypes, "CDLL", lambda *ignored, **options: SimpleNamespace(syscall=syscall))
    page.bind(bytearray(8), 0)


def full_folder(page, patch):
    patch.setattr(page, "FOLDER", "/")
    page.new_file(10**30)


def short_file(page, patch):
    with page.unnamed(b"four") as file:
        page.read_into(file.fileno(), memoryview(bytearray(6)))


def unplanted(model):
    """Return a model with other successors than those that are planted in it."""
    model.table = model.table.roll(1)
    return model


def wrong_successors(page, patch):
    model = unplanted(page.planted("cpu", page.config_of(1, 128, 8)))
    page.continued(model, torch.zeros(1, 2, dtype=torch.int64), 1)


def wrong_successors_of_the_ladder(page, patch):
    sizes = {"layers": 1, "width": 128, "steps": 1}
    page.reference(unplanted(page.state("cpu", **sizes)), *page.inputs("cpu", **sizes))


def full_cache(page, patch):
    config = page.Config(layers=1, width=8, heads=1, kv_heads=1, hidden=8, length=4)
    page.Cache(config, 1, 4).plan(2, 3, "cpu")


def pages_of(page):
    config = SimpleNamespace(layers=1, heads=1, kv_heads=1, head=8, length=page.PAGE)
    return page.Pages(config, 1, 0, "cpu")


def served(page, *arguments, length=16):
    """Call the class of a page that plans answers, for a model with a short cache."""
    kind = getattr(page, "Sequence", None) or page.Answers
    kind(SimpleNamespace(config=SimpleNamespace(length=length)), ints(1, page.PROMPT), *arguments)


def persistent(changes, dtype=torch.bfloat16):
    """Return a row's call with a model that the persistent kernel does not take."""

    def call(page, patch):
        config = dataclasses.replace(page.config_of(1, 128, 8), **changes)
        page.addresses(page.Decoder(config, dtype=dtype))

    return call


def gqa(heads, groups, tokens):
    cache = bf16(1, groups, tokens, 128)
    return lambda page, patch: page.attended(bf16(1, heads, 1, 128), cache, cache, 1, 64)


def sparse(tokens, entries):
    q = bf16(1, 1, tokens, 128)
    return lambda page, patch: page.attended(q, q, q, entries, listed=True)


def paged(heads, dtype):
    k, table = bf16(4, 16, 8, 128), torch.zeros(1, 2, dtype=dtype)
    return lambda page, patch: page.attended(
        bf16(1, heads, 1, 128), k, k, table, torch.tensor([20], dtype=INT32), 16, 64, paged=True
    )


def tree(tokens, words):
    k = bf16(1, 8, tokens, 128)
    return lambda page, patch: page.attended(bf16(1, 32, 3, 128), k, k, ints(words), 64)


def rope(tokens, slots):
    cache = {"k": bf16(4, 8, 128), "v": bf16(4, 8, 128)}
    positions = torch.arange(tokens)
    return lambda page, patch: page.launched(
        cache, bf16(tokens, 48, 128), positions, torch.arange(slots)
    )


def grouped(channels, ends):
    w = torch.ones(2, 16, 128)
    return lambda page, patch: page.multiplied(
        bf16(4, channels), w.to(torch.float8_e4m3fn), w[:, :, 0], ends
    )


def varlen(page, patch):
    q = bf16(3, 2, 128)
    page.attended(q, q, q, torch.tensor([0, 3]), page.blocks_of([0, 3]))


def no_cached_tokens(page, patch):
    k = bf16(1, page.GROUPS, 0, page.DIM)
    page.attended(bf16(1, page.GROUPS * page.GROUP, 1, page.DIM), k, k)


def of(name, *arguments):
    """Return a row's call of one function of the page."""
    return lambda page, patch: getattr(page, name)(*arguments)


OTHER_COUNTS = torch.ones(2, dtype=INT32)
ROWS = [
    (
        "ch02.l2_set_aside_test",
        "this GPU, or this slice of it (MIG), can set no part of the L2 aside",
        no_set_aside,
    ),
    ("ch02.l2_set_aside_test", "cuCtxSetLimit: CUDA_ERROR_UNSUPPORTED_LIMIT", driver_error),
    ("ch02.numa_test", "[Errno 1] mbind: Operation not permitted", forbidden_binding),
    (
        "ch05.unnamed_files",
        f"[Errno {errno.ENOSPC}] cannot write {10**30:,} bytes to /: {os.strerror(errno.ENOSPC)}."
        " Set TMPDIR to a folder that can be written and has room",
        full_folder,
    ),
    ("ch05.unnamed_files", "the file ends at 4, 2 bytes too early", short_file),
    ("ch06.unified_memory_test", "cuMemFree: CUDA_ERROR_INVALID_VALUE", managed_error),
    (
        "ch09.cross_entropy_test",
        "rows of 12 logits; clustered needs a multiple of 8",
        of("clustered", bf16(2, 12), ints(2)),
    ),
    (
        "ch09.cross_entropy_test",
        "rows of 12 logits; needs a multiple of 8, and at most 262144",
        of("staying", None, bf16(2, 12), ints(2)),
    ),
    (
        "ch09.cross_entropy_test",
        "rows of 262152 logits; needs a multiple of 8, and at most 262144",
        of("staying", None, bf16(1, 262152), ints(1)),
    ),
    (
        "ch09.rms_norm_test",
        "rows of 12 elements; clustered needs a multiple of 8",
        of("clustered", bf16(2, 12), bf16(12)),
    ),
    (
        "ch09.rms_norm_test",
        "rows of 12 elements; needs a multiple of 8, and at most 262144",
        of("staying", None, bf16(2, 12), bf16(12)),
    ),
    (
        "ch09.rms_norm_test",
        "rows of 262152 elements; needs a multiple of 8, and at most 262144",
        of("staying", None, bf16(1, 262152), bf16(262152)),
    ),
    (
        "ch09.softmax_test",
        "rows of 6 elements; clustered needs a multiple of 4",
        of("clustered", torch.ones(2, 6)),
    ),
    (
        "ch12.new_addresses_test",
        "cuGraphExecUpdate: CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, CU_GRAPH_EXEC_UPDATE_ERROR",
        graph_update_error,
    ),
    (
        "ch15.expert_puts_test",
        "5 tokens, but the buffers have room for 4 of each rank",
        of("require_room", bf16(5, 8), OTHER_COUNTS.long(), 2, 4),
    ),
    (
        "ch15.expert_puts_test",
        "x is torch.bfloat16, strides (1, 4); use contiguous bf16",
        of("require_room", bf16(8, 4).t()[:4], OTHER_COUNTS.long(), 2, 4),
    ),
    (
        "ch15.expert_puts_test",
        "counts is torch.int32 (2,); use int64 (2,)",
        of("require_room", bf16(4, 8), OTHER_COUNTS, 2, 4),
    ),
    (
        "ch15.speculative_decoding_test",
        "a draft of 0 tokens leaves nothing to verify",
        lambda page, patch: served(page, 4, 0),
    ),
    (
        "ch15.speculative_decoding_test",
        "17 tokens do not fit in a cache of 16",
        lambda page, patch: served(page, 5, 4),
    ),
    (
        "ch16.eos_poll_test",
        "an answer of at most 0 tokens",
        lambda page, patch: served(page, 0),
    ),
    (
        "ch16.eos_poll_test",
        "17 tokens do not fit in a cache of 16",
        lambda page, patch: served(page, 9),
    ),
    (
        "ch16.prefill_graphs_test",
        "a prompt of 9 tokens fits in no bucket; the largest is 8",
        of("bucket_of", 9, [4, 8]),
    ),
    (
        "ch18.attention_ladder",
        "q, k and v need one shape (1, heads, tokens, 128): torch.Size([1, 2, 4, 128])",
        of("shape_of", bf16(1, 2, 4, 128), bf16(1, 1, 4, 128), bf16(1, 2, 4, 128)),
    ),
    (
        "ch18.attention_ladder",
        "needs heads of 128 and at least one token, not (1, 2, 0, 128)",
        of("shape_of", *[bf16(1, 2, 0, 128)] * 3),
    ),
    (
        "ch18.attention_ladder",
        "needs one type of (torch.bfloat16,), not torch.float32, torch.bfloat16 and torch.bfloat16",
        of("shape_of", torch.ones(1, 2, 4, 128), *[bf16(1, 2, 4, 128)] * 2),
    ),
    (
        "ch18.block_sparse_test",
        "a block of queries sees 0 blocks of keys",
        of("checked", ints(1, 1, 0), 4),
    ),
    (
        "ch18.block_sparse_test",
        "the list has blocks 0 to 0, but there are 0",
        of("checked", ints(1, 1, 1), 0),
    ),
    (
        "ch18.block_sparse_test",
        "65 tokens are no multiple of the block of 64",
        sparse(65, ints(1, 1, 1)),
    ),
    (
        "ch18.block_sparse_test",
        "entries are torch.uint8; a list is int32, and flags are uint8",
        sparse(64, ints(1, 1, 1).byte()),
    ),
    (
        "ch18.block_sparse_test",
        "entries are (1, 1, 1) for 1 heads, 2 blocks",
        sparse(128, ints(1, 1, 1)),
    ),
    (
        "ch18.documents_test",
        "3 tokens cannot be 4 documents of at least one token",
        of("lengths_of", 3, 4),
    ),
    (
        "ch18.gqa_decode_test",
        "the context has 0 tokens, so there is nothing to attend to",
        gqa(8, 1, 0),
    ),
    ("ch18.gqa_decode_test", "8 query heads cannot share 3 groups of keys", gqa(8, 3, 5)),
    (
        "ch18.mla_decode_test",
        "the context has 0 tokens, so there is nothing to attend to",
        of("attended", bf16(1, 4, 576), bf16(1, 0, 576), 64),
    ),
    (
        "ch18.paged_decode_test",
        "sequence 0 has 0 tokens: nothing to attend to",
        of("page_table", [[0]], 4, [0], 16),
    ),
    (
        "ch18.paged_decode_test",
        "sequence 0 has 17 tokens, but only 1 pages of 16",
        of("page_table", [[0]], 4, [17], 16),
    ),
    (
        "ch18.paged_decode_test",
        "sequence 0 has page 4, but the pool has 4 pages",
        of("page_table", [[4]], 4, [16], 16),
    ),
    ("ch18.paged_decode_test", "9 query heads cannot share 8 groups of keys", paged(9, INT32)),
    (
        "ch18.paged_decode_test",
        "table and lengths are torch.int64, torch.int32; use int32",
        paged(8, torch.int64),
    ),
    ("ch18.rope_cache_test", "there are 0 tokens to write", rope(0, 0)),
    ("ch18.rope_cache_test", "slots is torch.int64 (3,); use int64 (2,)", rope(2, 3)),
    (
        "ch18.split_kv",
        "q is torch.float32; this kernel takes torch.bfloat16",
        of("refuse", "q", torch.ones(2), (2,)),
    ),
    ("ch18.split_kv", "q is (2,); this kernel takes (3,)", of("refuse", "q", bf16(2), (3,))),
    ("ch18.split_kv", "q is (2, 0): it is empty", of("refuse", "q", bf16(2, 0), (2, 0))),
    ("ch18.split_kv", "q is not contiguous", of("refuse", "q", bf16(2, 3).t(), (3, 2))),
    ("ch18.tree_attention_test", "the tree has 0 nodes", of("words_of", [], 0)),
    (
        "ch18.tree_attention_test",
        "the tree has 33 nodes; a word holds 32",
        of("words_of", [[0]], 33),
    ),
    (
        "ch18.tree_attention_test",
        "node 3 of a branch is not one of the 3 nodes",
        of("words_of", [[0, 3]], 3),
    ),
    (
        "ch18.tree_attention_test",
        "3 tokens are no more than the 3 nodes: no context",
        tree(3, words=3),
    ),
    ("ch18.tree_attention_test", "3 nodes need 3 words of int32", tree(9, words=2)),
    (
        "ch18.varlen_test",
        "sequence 1 has 0 tokens: nothing to attend to",
        of("begins_of", [3, 0]),
    ),
    ("ch18.varlen_test", "begins and blocks are torch.int64, torch.int32; use int32", varlen),
    (
        "ch19.block_formats_test",
        "rows of 200 elements; needs a multiple of 32",
        of("launch", None, bf16(2, 200), 200, 32, 4),
    ),
    (
        "ch19.fp8_grouped_test",
        "x needs 128 channels, a multiple of 128, not (4, 256)",
        grouped(256, OTHER_COUNTS),
    ),
    (
        "ch19.fp8_grouped_test",
        "ends needs 2 int32 numbers, not torch.int64 torch.Size([2])",
        grouped(128, OTHER_COUNTS.long()),
    ),
    (
        "ch19.kv_quantization_test",
        "the cache has no tokens, so there is nothing to attend to",
        no_cached_tokens,
    ),
    (
        "ch20.decode_ladder_test",
        "a planted successor is not the best token",
        wrong_successors_of_the_ladder,
    ),
    (
        "ch20.decode_ladder_test",
        "persistent needs heads of 64 elements, not 32",
        persistent({"heads": 4}),
    ),
    (
        "ch20.decode_ladder_test",
        "persistent needs as many query heads for each key head, but there are 3 query heads and 2"
        " key heads",
        persistent({"width": 192, "heads": 3, "kv_heads": 2}),
    ),
    (
        "ch20.decode_ladder_test",
        "persistent needs a hidden size of 8 x n, not 100",
        persistent({"hidden": 100}),
    ),
    (
        "ch20.decode_ladder_test",
        "persistent needs weights in torch.bfloat16, not torch.float32",
        persistent({}, torch.float32),
    ),
    ("decoder", "5 tokens do not fit in a cache of 4", full_cache),
    (
        "server",
        "2 prompts in one call: pages take one at a time",
        lambda page, patch: pages_of(page).rows(0, 2),
    ),
    (
        "server",
        "no pages for 4096 tokens",
        lambda page, patch: pages_of(page).begin(0, 4096),
    ),
    ("serving", "a planted successor is not the best token", wrong_successors),
]
"""The module, the whole message, and a call that raises it, given the page and `monkeypatch`."""


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"suites.{name}")


@pytest.mark.parametrize(("name", "message", "call"), ROWS, ids=[f"{r[0]}-{r[1]}" for r in ROWS])
def test_bad_input_is_refused_by_name(load, monkeypatch, name, message, call):
    page = load(name)
    with pytest.raises((ValueError, RuntimeError, OSError, EOFError)) as e:
        call(page, monkeypatch)
    assert str(e.value) == message
    assert str(e.traceback[-1].path) == page.__file__


def pattern(node):
    """Return a regular expression for all texts that the expression `node` may have."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(map(pattern, node.values))
    return ".+"


def raised(source):
    """Yield the line and a pattern of the message of every error that a module raises."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            *number, text = map(pattern, node.exc.args)  # an OSError has a number, and shows it
            yield node.lineno, "".join(rf"\[Errno {each}\] " for each in number) + text


def unmatched(source, messages):
    """Return the lines of a module that raise an error with none of these messages."""
    found = sorted(raised(source))
    return [n for n, words in found if not any(re.fullmatch(words, each) for each in messages)]


def test_every_message_of_a_page_has_a_row():
    found = []
    for path in sorted((ROOT / "suites").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "suites").with_suffix("").parts)
        messages = [message for page, message, _ in ROWS if page == name]
        found += [f"{name}:{line}" for line in unmatched(path.read_text(), messages)]
    assert not found


def test_a_new_message_has_no_row():
    source = """
def a(n):
    if n < 1:
        raise ValueError(f"needs {n} rows")
    if n > 9:
        raise OSError(28, f"{n} is full")
    raise ValueError("no more")
"""
    assert unmatched(source, []) == [4, 6, 7]
    assert unmatched(source, ["needs 0 rows", "needs rows", "[Errno 28] 10 is full"]) == [7]
