"""Tensor maps: tensors that TMA cannot address are refused; the arguments passed to cuda.core."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytest_aisp import tensor_map
from pytest_aisp.kernels import arguments
from pytest_aisp.kernels.arguments import LaunchError
from pytest_aisp.kernels.fake_gpu import fake_gpu


@pytest.fixture
def encoded(monkeypatch):
    """Return the arguments that the driver would get, on a fake GPU."""
    calls = []
    monkeypatch.setattr(
        arguments, "_encode_tensor_map", lambda *given: calls.append(given) or "descriptor"
    )
    with fake_gpu("sm90"):
        yield calls


def on_gpu(*shape, dtype=torch.float16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_a_map_holds_its_tensor_and_tile(encoded):
    x = on_gpu(64, 128)
    result = tensor_map(x, [64, 64], swizzle=128)
    assert (result.tensor is x, result.box, result.descriptor) == (True, (64, 64), "descriptor")
    [(_, box, swizzle, promotion)] = encoded
    assert (box, swizzle, promotion) == ((64, 64), 128, 128)


@pytest.mark.parametrize(
    ("make", "box", "options", "message"),
    [
        (lambda: torch.empty(64, 64), (8, 8), {}, "it is on the CPU"),
        (
            lambda: on_gpu(64, 64),
            (8,),
            {},
            "needs 1 to 5 dimensions, and the tile needs the same number",
        ),
        (lambda: on_gpu(2, 2, 2, 2, 2, 8), (1,) * 6, {}, "needs 1 to 5 dimensions"),
        (lambda: on_gpu(512, 512), (257, 8), {}, "a tile has 1 to 256 elements in each"),
        (lambda: on_gpu(512, 512), (0, 8), {}, "a tile has 1 to 256 elements"),
        (lambda: on_gpu(8, 8, dtype=torch.complex64), (8, 8), {}, "elements of 1, 2, 4 or 8"),
        (lambda: on_gpu(0, 64), (8, 8), {}, "and at least one"),
        (lambda: on_gpu(64, 64).t(), (8, 8), {}, "its last dimension must be contiguous"),
        (lambda: on_gpu(64, 60), (8, 8), {}, "each row must begin at a multiple of 16 bytes"),
        (lambda: on_gpu(64, 64)[:, 1:57], (8, 8), {}, "each row must begin at a multiple of 16"),
        (lambda: on_gpu(1, 64).expand(8, 64), (8, 8), {}, "each row must begin"),
        (lambda: on_gpu(64, 64), (8, 4), {}, "a row of a tile is 8 bytes; needs a multiple of 16"),
        (lambda: on_gpu(64, 64), (8, 8), {"swizzle": 16}, "swizzle is one of [0, 32, 64, 128]"),
        (lambda: on_gpu(64, 64), (8, 8), {"promotion": 32}, "promotion of [0, 64, 128, 256]"),
        (lambda: on_gpu(64, 64), (8, 64), {"swizzle": 64}, "128 bytes; swizzle=64 has at most"),
    ],
)
def test_unsupported_tensor_maps_are_refused(encoded, make, box, options, message):
    with pytest.raises(LaunchError) as error:
        tensor_map(make(), box, **options)
    assert message in str(error.value)
    assert str(error.value).startswith("tensor_map of a ")
    assert encoded == []


@pytest.mark.parametrize(
    ("dtype", "sent"),
    [
        (torch.bfloat16, torch.uint16),
        (torch.float16, torch.uint16),
        (torch.float8_e4m3fn, torch.uint8),
        (torch.int32, torch.int32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_elements_are_passed_in_a_supported_dtype(monkeypatch, dtype, sent):
    seen = []

    class View:
        @staticmethod
        def from_dlpack(tensor, stream_ptr):
            seen.append((tensor.dtype, tensor.requires_grad, stream_ptr))
            return SimpleNamespace(as_tensor_map=lambda box, **options: (box, options))

    import cuda.core.utils
    from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle

    monkeypatch.setattr(cuda.core.utils, "StridedMemoryView", View)
    box, options = arguments._encode_tensor_map(torch.zeros(8, 64).to(dtype), (8, 16), 32, 256)
    assert seen == [(sent, False, -1)]
    assert box == (8, 16)
    assert options == {
        "swizzle": TensorMapSwizzle.SWIZZLE_32B,
        "l2_promotion": TensorMapL2Promotion.L2_256B,
    }


def test_cuda_core_supports_these_dtypes():
    from cuda.core._tensor_map import _NUMPY_DTYPE_TO_TMA

    for dtype in ("uint8", "uint16", "int32", "int64", "float32", "float64"):
        assert any(known.name == dtype for known in _NUMPY_DTYPE_TO_TMA), dtype
