"""A baseline JPEG encoder from quantized coefficients, and a decoder in float64.

The encoder writes valid JPEG files: 8 x 8 blocks, YCbCr, all components at full resolution, Huffman
codes. So a page can draw random coefficients, and any library can decode the files. The decoder in
float64 computes the exact pictures from the coefficients, without a file.
"""

import heapq
import struct

import torch

SIDE, LAST, ALL_ONES = 8, 63, 256
ZIGZAG = sorted(
    range(64),
    key=lambda at: (sum(divmod(at, 8)), at % 8 if sum(divmod(at, 8)) % 2 == 0 else at // 8),
)
"""For each coefficient in file order, its row-major place in the block."""
STEPS = torch.tensor([4 + 2 * sum(divmod(at, SIDE)) for at in ZIGZAG])
"""The quantization steps, in file order."""
TO_RGB = [[1.0, 0.0, 1.402], [1.0, -0.344136286, -0.714136286], [1.0, 1.772, 0.0]]


def random_coefficients(pictures, side):
    """Return random quantized coefficients (pictures, blocks, 3, 64) that decay as in a photo."""
    blocks = (side // SIDE) ** 2
    spread = 12.0 / (1 + torch.arange(64.0))
    spread = torch.stack([spread, spread / 3, spread / 3])
    spread[:, 0] = torch.tensor([60.0, 15.0, 15.0])
    laplace = torch.distributions.Laplace(torch.zeros_like(spread), spread / 2**0.5)
    return laplace.sample((pictures, blocks)).to(torch.int16)


def exact_pictures(coefficients, side):
    """Return the pictures (n, 3, side, side) in float64, before they are rounded to integers."""
    device, across = coefficients.device, side // SIDE
    points = torch.arange(SIDE, dtype=torch.float64)
    cosines = torch.cos((2 * points + 1) * points[:, None] * torch.pi / 16) / 2
    cosines[0] /= 2**0.5
    waves = (torch.kron(cosines, cosines)[ZIGZAG] * STEPS[:, None]).to(device)
    spots = (coefficients.double() @ waves).view(-1, across, across, 3, SIDE, SIDE)
    planes = spots.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, side * side)
    planes = planes.clamp(-128, 127)  # a decoder stores them as bytes
    colours = torch.tensor(TO_RGB, dtype=torch.float64, device=device) @ planes
    return (colours + 128).clamp(0, 255).view(-1, 3, side, side)


def jpeg(coefficients, side):
    """Return the bytes of a JPEG file of the coefficients (blocks, 3, 64)."""
    direct, alternating = _direct_tokens(coefficients), _alternating_tokens(coefficients)
    codes = [_huffman_codes(tokens[1]) for tokens in (direct, alternating)]
    parts = [b"\xff\xd8", _segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0")]
    parts.append(_segment(0xDB, bytes([0, *STEPS.tolist()])))
    components = b"".join(bytes([name, 0x11, 0]) for name in (1, 2, 3))
    parts.append(_segment(0xC0, struct.pack(">BHHB", 8, side, side, 3) + components))
    for kind, code in zip((0x00, 0x10), codes, strict=True):
        counts = [sum(length == n for length, _ in code.values()) for n in range(1, 17)]
        parts.append(_segment(0xC4, bytes([kind, *counts, *code])))
    parts.append(_segment(0xDA, bytes([3, 1, 0, 2, 0, 3, 0, 0, LAST, 0])))
    parts.append(_packed((direct, alternating), codes).replace(b"\xff", b"\xff\0"))
    return b"".join([*parts, b"\xff\xd9"])


def _segment(marker, data):
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


# Tokens are tensors: place in the file, symbol, the bits after the symbol's code, their number.


def _bits(values):
    """Return how many bits each value needs, and the bits as integers."""
    size = torch.frexp(values.abs().double()).exponent.long()
    return size, torch.where(values < 0, values + (1 << size) - 1, values)


def _direct_tokens(coefficients):
    """Return the tokens of each block's first coefficient: its difference from the previous
    block's."""
    first = coefficients[:, :, 0].long()
    size, bits = _bits(first.diff(dim=0, prepend=torch.zeros_like(first[:1])).flatten())
    return 64 * 4 * torch.arange(len(size)), size, bits, size


def _alternating_tokens(coefficients):
    """Return the tokens of the other coefficients: a number of zeros, then a value."""
    table = coefficients.long().reshape(-1, 64).clone()
    table[:, 0] = 0
    block, at = table.nonzero(as_tuple=True)
    size, bits = _bits(table[block, at])
    same = torch.zeros_like(block, dtype=torch.bool)
    same[1:] = block[1:] == block[:-1]
    before = torch.where(same, at.roll(1), 0)
    zeros = at - before - 1
    places = (block * 64 + at) * 4
    tokens = [(places + 3, zeros % 16 * 16 + size, bits, size)]
    for turn in range(3):  # each token stands for 16 zeros
        more = places[zeros // 16 > turn] + turn
        tokens.append((more, torch.full_like(more, 0xF0), *torch.zeros(2, len(more)).long()))
    open_blocks = (table[:, LAST] == 0).nonzero().flatten()
    ends = (open_blocks * 64 + LAST) * 4 + 3
    tokens.append((ends, *torch.zeros(3, len(ends)).long()))
    return tuple(torch.cat(parts) for parts in zip(*tokens, strict=True))


def _huffman_codes(symbols):
    """Return the length and the code of each symbol, shortest first. No code is all ones."""
    counts = dict(zip(*(part.tolist() for part in symbols.unique(return_counts=True)), strict=True))
    while True:
        heap = [(count, symbol, {symbol: 0}) for symbol, count in counts.items()]
        heap.append((0, ALL_ONES, {ALL_ONES: 0}))
        heapq.heapify(heap)
        while len(heap) > 1:
            (count, tie, left), (more, _, right) = heapq.heappop(heap), heapq.heappop(heap)
            joined = {symbol: depth + 1 for symbol, depth in (left | right).items()}
            heapq.heappush(heap, (count + more, tie, joined))
        lengths = heap[0][2]
        if max(lengths.values()) <= 16:
            break
        counts = {symbol: count // 2 + 1 for symbol, count in counts.items()}
    code, last, codes = 0, 0, {}
    for length, symbol in sorted((length, symbol) for symbol, length in lengths.items()):
        code <<= length - last
        codes[symbol] = length, code
        code, last = code + 1, length
    del codes[ALL_ONES]  # the last code, which is all ones
    return codes


def _packed(kinds, codes):
    """Return the bits of all tokens in the order of their places, padded with ones."""
    placed = []
    for (place, symbol, bits, size), code in zip(kinds, codes, strict=True):
        table = torch.zeros(2, 256, dtype=torch.long)
        table[:, list(code)] = torch.tensor(list(code.values())).t()
        length, prefix = table[:, symbol]
        placed.append((place, length + size, (prefix << size) | bits))
    place, length, value = (torch.cat(parts) for parts in zip(*placed, strict=True))
    order = place.argsort()
    length, value = length[order], value[order]
    ends = length.cumsum(0)
    total = int(ends[-1])
    token = torch.repeat_interleave(length)
    bits = (value[token] >> (ends[token] - 1 - torch.arange(total))) & 1
    padded = torch.ones(-(-total // 8) * 8, dtype=torch.long)
    padded[:total] = bits
    weights = 1 << torch.arange(7, -1, -1)
    return (padded.view(-1, 8) * weights).sum(dim=1).to(torch.uint8).numpy().tobytes()
