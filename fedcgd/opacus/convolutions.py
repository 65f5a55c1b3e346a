"""Per-example gradients of convolutions in main memory, without the unfolded input where that is larger than they are.

Opacus copies each pixel to all places where the kernel meets it. For 32 channels of 32 × 32 pixels and a kernel of 3 × 3 that is
nine times the input, 38 MB for 32 examples, which the C library asks the kernel for, and gives back, in each step.
"""

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.conv import compute_conv_grad_sample
from torch import Tensor, nn

from fedcgd.clipping.layerwise import convolution_gradients


def convolution(layer: nn.Conv2d, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """What the sampler that Opacus has for `nn.Conv2d` returns, but for rounding: (examples, *shape) for each parameter."""
    registered = GradSampleModule.GRAD_SAMPLERS[nn.Conv2d]
    if registered is not compute_conv_grad_sample or not _grouping_pays(layer, activations[0], backprops):
        found: dict[nn.Parameter, Tensor] = registered(layer, activations, backprops)
        return found
    rows = convolution_gradients(layer, activations[0], backprops)
    return {getattr(layer, part): row for part, row in rows.items()}


def _grouping_pays(layer: nn.Conv2d, inputs: Tensor, backprops: Tensor) -> bool:
    """Whether one grouped convolution can do it, and the unfolded input is larger than the gradients of the weight."""
    return (
        inputs.dim() == backprops.dim() == 4
        and len(inputs) > 0
        and inputs.device.type == "cpu"
        and inputs.dtype == backprops.dtype == torch.float32
        and layer.weight.requires_grad
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and backprops[0, 0].numel() * layer.groups > layer.out_channels
    )
