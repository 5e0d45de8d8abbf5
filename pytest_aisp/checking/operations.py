"""Lists of PyTorch's operations, grouped by rounding: exact ones, products, sums, and others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import torch  # noqa: TID253 - imported only in worker processes

from .numerics import UNIT

Operation = torch._ops.OpOverload


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


EXACT = _words(
    "detach alias clone copy _to_copy lift_fresh lift cat stack index index_select gather take "
    "take_along_dim embedding where masked_fill masked_select masked_scatter fill zero "
    "index_put scatter slice_scatter select_scatter diagonal_scatter as_strided_scatter "
    "index_copy index_fill roll flip rot90 sort topk kthvalue median nanmedian mode max min "
    "amax amin aminmax argmax argmin maximum minimum fmax fmin clamp clamp_min clamp_max relu "
    "relu6 hardtanh threshold leaky_relu_backward threshold_backward hardtanh_backward abs neg "
    "sign sgn signbit floor ceil round trunc fix heaviside copysign ldexp frexp max_pool1d "
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d "
    "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d repeat unfold im2col pixel_shuffle pixel_unshuffle "
    "channel_shuffle tril triu diag_embed diag nan_to_num repeat_interleave resize resize_ set_ "
    "real imag conj _conj resolve_conj resolve_neg view_as_real view_as_complex complex one_hot "
    "cummax cummin unique_dim _unique2 bucketize searchsorted isclose equal nonzero empty_like "
    "zeros_like ones_like full_like new_empty new_zeros new_ones new_full _local_scalar_dense "
    "item bernoulli fmod remainder _linalg_check_errors native_dropout"
)
"""Operations that select, move or compare values, and never round."""
PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "mv": (0, 1),
    "addmv": (1, 2),
    "dot": (0, 1),
    "vdot": (0, 1),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
    "_cdist_forward": (0, 1),
    "_grouped_mm": (0, 1),
}
"""Operations that sum products, with the positions of the operands in their arguments."""
ARITHMETIC = _words("add sub rsub mul div reciprocal sqrt square addcmul addcdiv lerp hypot")
SCATTERED = _words(
    "scatter_add index_add scatter_reduce index_reduce put index_put embedding_dense_backward "
    "_embedding_bag_backward max_pool2d_with_indices_backward"
)
"""Operations that accumulate sums in memory. Each partial sum is rounded to the stored format."""
DECOMPOSED = _words(
    "gelu gelu_backward silu silu_backward mish mish_backward softplus softplus_backward elu "
    "hardswish hardswish_backward hardsigmoid log_sigmoid_forward log_sigmoid_backward _softmax "
    "_log_softmax _softmax_backward_data _log_softmax_backward_data logsumexp std std_mean "
    "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "native_batch_norm native_batch_norm_backward _native_batch_norm_legit cudnn_batch_norm "
    "_native_batch_norm_legit_no_training cudnn_batch_norm_backward "
    " nll_loss_forward mse_loss smooth_l1_loss huber_loss "
    "binary_cross_entropy xlogy logit sinc _safe_softmax "
    "linalg_vector_norm norm logaddexp logaddexp2"
)
"""Composite operations, which tracing splits into simpler operations."""


@functools.cache
def decompositions() -> Mapping[object, Callable[..., object]]:
    """Return PyTorch's own decompositions of the operations in `DECOMPOSED`."""
    from torch._decomp import get_decompositions

    packets = [getattr(torch.ops.aten, name, None) for name in DECOMPOSED]
    found = get_decompositions([packet for packet in packets if packet is not None])
    aten = torch.ops.aten
    # PyTorch's decompositions of these two import sympy, which takes seconds in each process.
    own = {aten._softmax.default: _softmax, aten._log_softmax.default: _log_softmax}
    return {operation: function for pairs in (found, own) for operation, function in pairs.items()}


def _shifted(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return `x` minus the maximum of `x` along `dim`, in fp32 if `x` has a smaller format."""
    wide = x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x
    return wide - wide.amax(dim, keepdim=True) if x.numel() else wide


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    exponentials = torch.exp(_shifted(x, dim))
    shares = exponentials / exponentials.sum(dim, keepdim=True)
    return shares if half_to_float else shares.to(x.dtype)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    shifted = _shifted(x, dim)
    logarithms = shifted - shifted.exp().sum(dim, keepdim=True).log()
    return logarithms if half_to_float else logarithms.to(x.dtype)


@functools.cache
def name_of(func: Operation) -> str:
    """Return the name of an operation. The final underscore of an in-place operation is removed."""
    name: str = func.overloadpacket.__name__
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def tensors_of(value: object) -> list[torch.Tensor]:
    """Return the tensors in the arguments or the results of an operation."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    return []


def has_error(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether `value` is a tensor of real or complex floating point numbers."""
    return (
        isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
    )


def mutated(
    func: Operation, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[torch.Tensor]:
    """Return the existing tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += tensors_of(value)
    return written


def terms_of(name: str, args: Sequence[object], out: object) -> int:
    """Return the number of terms that are summed in each element of the result."""
    tensors = tensors_of(args)
    if name in ("convolution", "convolution_backward"):
        weight = args[1] if name == "convolution" else args[2]
        gradient = args[0]
        assert isinstance(weight, torch.Tensor)
        assert isinstance(gradient, torch.Tensor)
        transposed, groups = (args[6], args[8]) if name == "convolution" else (args[7], args[9])
        channels = weight.shape[1] * int(groups) if transposed else weight.shape[0]  # type: ignore[call-overload]
        terms = weight.numel() // max(1, channels)
        if name == "convolution_backward":
            terms = max(terms, gradient.numel() // max(1, gradient.shape[1]))
        return max(1, terms)
    if name in PRODUCTS:
        operand = args[PRODUCTS[name][0]]
        assert isinstance(operand, torch.Tensor)
        return max(1, operand.shape[-1] if operand.dim() else 1)
    read = max((t.numel() for t in tensors), default=1)
    made = max((t.numel() for t in tensors_of(out)), default=1)
    if read > made > 0:
        return -(-read // made)
    longest = max((max(t.shape, default=1) for t in tensors), default=1)
    return max(1, longest)


@functools.cache
def unit_of(dtype: torch.dtype | None) -> float:
    """Return the unit roundoff of `dtype`. A constant counts as float32."""
    name = str(dtype).removeprefix("torch.")
    return UNIT.get({"complex64": "float32", "complex128": "float64"}.get(name, name), 2.0**-24)


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which PyTorch computes with values of type `dtype`."""
    if dtype in (torch.complex64, torch.complex128):
        return torch.float32 if dtype is torch.complex64 else torch.float64
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


@functools.cache
def promoted(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    """Return the type of a result that PyTorch computes from values of the types `a` and `b`."""
    if a is None or b is None:
        return a or b
    return torch.promote_types(a, b)
