"""Change values by small random amounts, as rounding does."""

from __future__ import annotations

import functools
import math
import struct
from random import Random

import torch  # noqa: TID253 - imported only in worker processes

from .operations import has_error

SIGNS = 1048573
"""Number of random signs: a prime number, so that the signs do not line up with a tensor's rows."""


class Perturbation:
    """Random perturbations from one `seed`, each `scale` times larger than requested."""

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        self._random, self.scale = Random(seed), scale
        self._signs: dict[float, int] = {}
        self._read_sign = 0

    def in_place(self, tensor: torch.Tensor, error: float) -> None:
        """Multiply each element by 1 plus or minus `error` times the scale, in place."""
        if not error or not tensor.numel():
            return
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = _flat(real)
        count = flat.numel() if flat is not None else real.numel()
        period = min(count, SIGNS)
        start = self._random.randrange(SIGNS)
        signs = _signs(real.device, real.dtype)[start : start + period]
        factors = (signs * (error * self.scale)).add_(1)  # infinite values stay infinite
        if flat is None:
            real.mul_(factors.repeat(-(-count // period))[:count].view(real.shape))
            return
        if period == count:
            flat.mul_(factors)
            return
        whole = count - count % period
        flat[:whole].view(-1, period).mul_(factors)
        flat[whole:].mul_(factors[: count - whole])

    def copied(self, tensor: torch.Tensor, error: float) -> torch.Tensor:
        """Return a perturbed copy."""
        copied = tensor.clone()
        self.in_place(copied, error)
        return copied

    def read(self, value: float, of_terms: float, of_result: float) -> float:
        """Perturb a value that leaves PyTorch, where it may become a term of a sum.

        The sum's result is perturbed through its terms: `of_result` has one sign for all values.
        """
        self._read_sign = self._read_sign or self._random.choice((-1, 1))
        error = self._random.choice((-1, 1)) * of_terms + self._read_sign * of_result
        return value * (1 + error * self.scale)

    def constant(self, value: object, error: float) -> object:
        """Perturb a constant of a page's code, such as 0.7, if it is not exact in float32.

        A value has one sign: where a loop uses it again, its rounding error is the same.
        """
        if type(value) is not float or _as_float32(value) == value:
            return value
        if value not in self._signs:
            self._signs[value] = self._random.choice((-1, 1))
        return value * (1 + self._signs[value] * error * self.scale)

    def prefix_sum(self, args: tuple[object, ...], error: float) -> tuple[object, ...]:
        """Perturb the k-th term of a prefix sum by the error of a sum of k terms."""
        terms, dimension = args[0], args[1]
        assert isinstance(terms, torch.Tensor)
        if not terms.dim():
            return (self.copied(terms, error), *args[1:])
        noise = self.copied(terms, error).sub_(terms).nan_to_num_()
        count = terms.shape[int(dimension)]  # type: ignore[call-overload]
        roots = torch.arange(1, count + 1, device=terms.device, dtype=torch.float64).sqrt_()
        shape = [1] * terms.dim()
        shape[int(dimension)] = count  # type: ignore[call-overload]
        return (noise.mul_(roots.view(shape)).add_(terms), *args[1:])

    def factorization(self, args: tuple[object, ...], error: float) -> tuple[object, ...]:
        """Perturb matrices relative to their norms, like the errors of factorizations."""

        def moved(value: object) -> object:
            if not (has_error(value) and value.numel()):
                return value
            dims = tuple(range(max(0, value.dim() - 2), value.dim()))
            rms = value.abs().square().mean(dims, keepdim=True).sqrt() if dims else value.abs()
            noise = self.copied(torch.ones_like(value), 1.0).sub_(1.0)
            size = max(value.shape[-1], 1) if value.dim() else 1
            return value + noise * rms * (error * math.sqrt(size))

        return tuple(moved(value) for value in args)


def _as_float32(value: float) -> float:
    if abs(value) > torch.finfo(torch.float32).max:
        return value
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a flat view of `tensor`, or None if its memory has gaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    dense = tensor.permute(order)
    return dense.view(math.prod(tensor.shape)) if dense.is_contiguous() else None


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return `SIGNS` random signs, twice in a row, so that a slice may start at any sign."""
    generator = torch.Generator(device=device).manual_seed(1)
    signs = torch.randint(0, 2, (SIGNS,), generator=generator, device=device, dtype=torch.int8)
    signs = signs.to(dtype).mul_(2).sub_(1)
    return torch.cat([signs, signs])
