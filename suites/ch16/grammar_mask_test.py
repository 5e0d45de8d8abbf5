"""Grammar mask: send one bit per token, and apply the bits on the GPU.

Problem    A grammar allows each of `rows` sequences only some of `vocabulary` tokens. The grammar
           runs on the host and writes the allowed tokens into pinned memory in every decoding step.
           Set the bf16 logits of all other tokens to minus infinity. A row may allow any number of
           tokens, from none to all.
Baseline   bools: the grammar writes a byte per token. The bytes are copied to the GPU, and
           `masked_fill` applies them.
Optimized  bits: changes `bools`. The grammar writes a bit per token, in 32-bit words, like
           xgrammar. PyTorch unpacks the bits on the GPU with a shift and a comparison.
           fused: changes `bits`. A Triton kernel reads the bits and applies them in one pass.
Bound      PCIe for `bools` and `fused`. `bits` sends an eighth of the bytes of `bools`, but loses
           much of this gain, because it unpacks the bits in several passes over arrays that are up
           to 32 times as large. In `fused`, the copy of the bits still takes longer than the pass
           over the logits.
Seen       On an H100, all sides take 7 to 11 us more than predicted, which is a large share for
           `fused` and a small share for `bools`. For the copy from the host, the costs count the
           bytes and the start of a kernel. Starting a copy probably takes longer than starting a
           kernel.
Use when   A grammar or a list of forbidden tokens changes in every step. If the mask is always the
           same, leave it on the GPU, so that nothing is copied. Overlap the grammar, whose time on
           the host is not included here, with the forward pass of the step.
"""

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

WORD, BLOCK = 32, 1024


@triton.jit
def apply_kernel(logits, bits, out, vocabulary, words, BLOCK: tl.constexpr):
    """Copy each logit whose bit is set, and write minus infinity in place of the others."""
    row, token = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < vocabulary
    word = tl.load(bits + row * words + token // 32, mask=there, other=0)
    value = tl.load(logits + row * vocabulary + token, mask=there, other=0.0)
    allowed = (word >> (token % 32)) & 1 != 0
    result = tl.where(allowed, value, float("-inf"))
    tl.store(out + row * vocabulary + token, result, mask=there)


def packed(allowed):
    """Pack the allowed tokens into int32 words. Token 0 is the lowest bit of the first word."""
    rows, vocabulary = allowed.shape
    whole = allowed.new_zeros(rows, triton.cdiv(vocabulary, WORD) * WORD)
    whole[:, :vocabulary] = allowed
    words = (whole.unflatten(1, (-1, WORD)).long() << torch.arange(WORD)).sum(2)
    return torch.where(words < 2**31, words, words - 2**32).int()


def inputs(device, rows, vocabulary):
    logits = torch.randn(rows, vocabulary, device=device).bfloat16()
    share = torch.linspace(0, 1, rows)[:, None] if rows > 1 else torch.tensor([[0.5]])
    allowed = torch.rand(rows, vocabulary) < share
    # The allowed tokens as bytes and as bits. Each side uses the form that its grammar would write.
    return logits, pinned(allowed, device), pinned(packed(allowed), device)


def pinned(answer, device):
    # The fake GPU on which kernels are assembled has no pinned memory.
    pin = device == "cuda" and torch.accelerator.is_available()
    return torch.empty(answer.shape, dtype=answer.dtype, pin_memory=pin).copy_(answer)


def reference(logits, allowed, words):
    return logits.double().masked_fill(~allowed.to(logits.device), -torch.inf)


def bools(logits, allowed, words):
    mask = allowed.to(logits.device, non_blocking=True)
    return logits.masked_fill(~mask, -torch.inf)


def bits(logits, allowed, words):
    mask = words.to(logits.device, non_blocking=True)
    lanes = torch.arange(WORD, dtype=torch.int32, device=logits.device)
    forbidden = ((mask[:, :, None] >> lanes) & 1) == 0
    return logits.masked_fill(forbidden.flatten(1)[:, : logits.shape[1]], -torch.inf)


def fused(logits, allowed, words):
    mask, out = words.to(logits.device, non_blocking=True), torch.empty_like(logits)
    rows, vocabulary = logits.shape
    grid = triton.cdiv(vocabulary, BLOCK), rows
    apply_kernel[grid](logits, mask, out, vocabulary, mask.shape[1], BLOCK=BLOCK)
    return out


def work(rows, vocabulary):
    n = rows * vocabulary
    return Work(read=2 * n, write=2 * n, wire=n / 8)


def filled(n):
    """Return the cost of `masked_fill`, which copies the logits and then fills the copy."""
    return Cost(read=2 * n, write=2 * n, launches=1) + Cost(read=3 * n, write=2 * n, launches=1)


def bools_cost(rows, vocabulary):
    n = rows * vocabulary
    return Cost(h2d=n, launches=1) + Cost(read=n, write=n, launches=1) + filled(n)


def bits_cost(rows, vocabulary):
    """Return the cost of `bits`. Shifted words and their lowest bits take 4 bytes per token."""
    n = rows * vocabulary
    unpacked = Cost(launches=1) + Cost(read=n / 8, write=4 * n, launches=1)
    unpacked += Cost(read=4 * n, write=4 * n, launches=1) + Cost(read=4 * n, write=n, launches=1)
    return Cost(h2d=n / 8, launches=1) + unpacked + filled(n)


def fused_cost(rows, vocabulary):
    n = rows * vocabulary
    return Cost(h2d=n / 8, launches=1) + Cost(read=2 * n + n / 8, write=2 * n, launches=1)


@compare(
    baseline=bools,
    optimized=[Variant(bits, at_least={"sm90": 1.5}), Variant(fused, at_least={"sm90": 3.8})],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 64, "vocabulary": 128256}],
    check_sizes=[{"rows": 4, "vocabulary": 1061}, {"rows": 1, "vocabulary": 31}],
    work=work,
    bound="pcie",
    costs={bools: bools_cost, bits: bits_cost, fused: fused_cost},
)
def test_grammar_mask(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
