"""Layers without parameters as a processor computes them fastest, where torch's own way of doing it is slow."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.mul(x, 2).sigmoid_().mul_(2).sub_(1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.tanh_backward(slopes[0], *ctx.saved_tensors)
        return result


def tanh(x: Tensor) -> Tensor:
    """tanh(x) = 2/(1 + exp(−2x)) − 1, off by at most 2⁻²² in float32; its slope is 1 − tanh(x)².

    Both of torch's are as exact as float32 can be, also relatively and near 0, but its sigmoid takes a fifth of the time.
    """
    if x.device.type != "cpu":
        return torch.tanh(x)
    result: Tensor = _Tanh.apply(x)
    return result


class _Halved(torch.autograd.Function):
    """The largest of each 2 × 2 numbers: rows first, which lie side by side in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        upper, lower = x[..., ::2, :], x[..., 1::2, :]
        rows = torch.maximum(upper, lower)
        left, right = rows[..., ::2], rows[..., 1::2]
        ctx.save_for_backward(lower > upper, right > left)
        return torch.maximum(left, right)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        is_lower, is_right = ctx.saved_tensors
        rows = slopes[0].new_empty(is_lower.shape)
        _shared(slopes[0], is_right, rows[..., ::2], rows[..., 1::2])
        whole = rows.new_empty(*rows.shape[:-2], 2 * rows.shape[-2], rows.shape[-1])
        _shared(rows, is_lower, whole[..., ::2, :], whole[..., 1::2, :])
        return whole


def _shared(slope: Tensor, second: Tensor, of_first: Tensor, of_second: Tensor) -> None:
    torch.mul(slope, second, out=of_second)
    torch.sub(slope, of_second, out=of_first)


def max_pool2d(layer: nn.MaxPool2d, x: Tensor) -> Tensor:
    """`layer(x)`; where the largest number of a window is there twice, the slope is that of one of them, as torch's is.

    Windows of 2 × 2 take half of torch's time, for images whose channels lie apart in memory.
    """
    shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    halves = shape == (2, 2, 0, 1) and x.dim() == 4 and x.shape[2] % 2 == x.shape[3] % 2 == 0
    if not halves or x.device.type != "cpu" or not x.is_contiguous():
        return functional.max_pool2d(x, *shape, ceil_mode=layer.ceil_mode)
    result: Tensor = _Halved.apply(x)
    return result


class QuickTanh(nn.Module):
    """`tanh` as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return tanh(x)


def quick(model: nn.Module) -> nn.Module:
    """`model`, whose layers of class `nn.Tanh` are now `QuickTanh`."""
    for module in model.modules():
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Tanh:
                setattr(module, name, QuickTanh())
    return model
