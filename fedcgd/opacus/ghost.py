"""Per-example gradients of embedding layers, and of linear ones, kept as their factors: "ghost clipping" with one backward pass.

A table of embeddings has a gradient in those rows that an example looked up, and zeros, which are most of it, elsewhere. So the
rows alone are kept, also where linear layers keep their gradients. Those of convolutions are made in another way than Opacus'.

Opacus' own ghost clipping takes norms in a first backward pass and sums in a second one, which multiplies the losses. What it
adds is not what it measured (another criterion, other rounding, parameters that were frozen before), and one NaN spoils the sum.
Here both come from the same factors.
"""

from collections import ChainMap
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule
from opacus.grad_sample.conv import compute_conv_grad_sample
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.grad_sample.gsm_base import OPACUS_PARAM_MONKEYPATCH_ATTRS
from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fedcgd.clipping.layerwise import convolution_gradients
from fedcgd.opacus.clipped_sum import DenseGradients, FactoredGradients, PerSampleGradients, SparseGradients


def convolution(layer: nn.Conv2d, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """What the sampler that Opacus has for `nn.Conv2d` returns, but for rounding: (examples, *shape) for each parameter.

    Opacus copies each pixel to all places where the kernel meets it. For 32 channels of 32 × 32 pixels and a kernel of 3 × 3
    that is nine times the input, 38 MB for 32 examples, which the C library asks the kernel for, and gives back, in each step.
    """
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


def embedding_bag(layer: nn.EmbeddingBag, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """What Opacus' sampler returns, for bags that are given by offsets. Raises RuntimeError for others, on which it fails."""
    if len(activations) < 2:
        raise RuntimeError(
            "an EmbeddingBag has gradients of examples only where its bags are given by offsets: take nn.Embedding, and the mean "
            "or sum of what it returns (embedding(tokens).mean(1))"
        )
    found: dict[nn.Parameter, Tensor] = GradSampleModule.GRAD_SAMPLERS[nn.EmbeddingBag](layer, activations, backprops)
    return found


class _Samplers(ChainMap[Any, Any]):
    """By the class of a layer what makes its gradients, and leaves them where Opacus would put a copy of them."""

    def __getitem__(self, kind: Any) -> Callable[..., dict[nn.Parameter, Tensor]]:
        return partial(_leave_rows, super().__getitem__(kind))


def _leave_rows(
    sampler: Callable[..., dict[nn.Parameter, Tensor]], layer: Any, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """What `sampler` returns, or nothing, if it is in place: Opacus adds what is returned to zeros, for layers used again."""
    found = sampler(layer, activations, backprops)
    if not _used_once(layer) or {layer.max_batch_len} != {*map(len, found.values())}:
        return found
    for parameter, rows in found.items():
        if parameter.requires_grad:
            parameter._current_grad_sample = rows.contiguous()  # type: ignore[attr-defined]
    return {}


def layer_type(layer: nn.Module) -> type[nn.Module]:
    """The class of `layer`, which `fully_shard` may have replaced by one of its own."""
    return type(layer).__mro__[2] if isinstance(layer, FSDPModule) else type(layer)


class _SampleHooks:
    """Opacus' hooks, which leave `PerSampleGradients` in `grad_sample` for the layers whose gradients have a short form.

    Beside that, they take a layer's input once where `torch.utils.checkpoint` (with use_reentrant=False) runs its forward pass
    again, and leave backward passes of a layer in eval mode alone.
    """

    GRAD_SAMPLERS: ClassVar = _Samplers(
        {nn.Conv2d: convolution, nn.EmbeddingBag: embedding_bag}, GradSampleModule.GRAD_SAMPLERS
    )
    factors: ClassVar[dict[type[nn.Module], Callable[..., "Factors"]]] = {}
    hooks_enabled: bool
    rearrange_grad_samples: Callable[..., tuple[list[Tensor], Tensor]]

    _get_module_type = staticmethod(layer_type)

    def capture_activations_hook(self, module: nn.Module, forward_input: Any, _forward_output: Any) -> None:
        if not _is_recomputing() and not _is_copy(module):
            super().capture_activations_hook(module, forward_input, _forward_output)  # type: ignore[misc]

    def capture_backprops_hook(
        self, module: nn.Module, _forward_input: Any, forward_output: Any, loss_reduction: str, batch_first: bool
    ) -> None:
        if _is_copy(module) or (not module.training and not getattr(module, "activations", None)):
            return  # its forward pass made none: nothing is trained by this backward pass
        if self.hooks_enabled and vars(module).get("activations") == []:
            raise RuntimeError(
                f"a second backward pass through one forward pass of a {type(module).__name__} (retain_graph=True, or a "
                "penalty on gradients): gradients of examples are made in one for each. Add losses up before one backward pass; "
                "a penalty on gradients has none of single examples here"
            )
        factors = self.factors.get(layer_type(module))
        if not self.hooks_enabled or factors is None or not _used_once(module):
            hook = super().capture_backprops_hook  # type: ignore[misc]
            hook(module, _forward_input, forward_output, loss_reduction, batch_first)
            return
        activations, backprops = self.rearrange_grad_samples(
            module=module, backprops=forward_output[0].detach(), loss_reduction=loss_reduction, batch_first=batch_first
        )
        del module.max_batch_len
        for parameter, rows in factors(module, activations[0], backprops):
            if parameter.requires_grad:
                parameter._forward_counter -= 1
                earlier = parameter.grad_sample
                parameter.grad_sample = (
                    rows if earlier is None else [*(earlier if isinstance(earlier, list) else [earlier]), rows]
                )


def _is_copy(module: nn.Module) -> bool:
    """Whether it is a layer of a copy of the private model, as one that averages weights is: hooks are copied, but no run."""
    for p in module.parameters():
        if p.requires_grad:
            return not hasattr(p, "_forward_counter")
    return False


def _is_recomputing() -> bool:
    """Whether a forward pass runs again in a backward pass, for what it did not keep: its input was taken the first time."""
    return "_recomputation_hook" in _saved_by()


def refuse_recomputing(layer: nn.Module, _inputs: Any) -> None:
    """A pre-hook of layers with expanded weights: raises RuntimeError in `torch.utils.checkpoint` (with use_reentrant=False).

    What is computed again has plain weights and saves other tensors, so that a backward pass takes one for another.
    """
    if "_checkpoint_hook" in _saved_by():
        raise RuntimeError(
            f"grad_sample_mode 'ew' does not go with torch.utils.checkpoint, in which a {type(layer).__name__} is called: what "
            "is computed again has other gradients. Take grad_sample_mode='hooks' or 'ghost'"
        )


def _saved_by() -> str:
    """The name of what takes the tensors that are saved for a backward pass; empty if nobody does."""
    if torch.compiler.is_compiling():
        return ""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else getattr(hooks[0], "__qualname__", "")


class GhostLoss:
    """`criterion` as Opacus returns it with ghost clipping: it takes the `shape` of the logits of sequences too.

    `criterion` has a `reduction` that can be set to "none"; then it returns one loss per example, or per token with `shape`.
    """

    def __init__(self, criterion: Any, reduction: str) -> None:
        if getattr(criterion, "reduction", reduction) != reduction:
            raise ValueError(f"loss_reduction is {reduction!r}, and the criterion's is {criterion.reduction!r}")
        self.criterion, self.reduction = criterion, reduction

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> Tensor:
        """The loss of the batch, whose examples are rows; with `shape` (examples, length, …) each of `length` rows."""
        self.criterion.reduction = "none"
        losses: Tensor = self.criterion(*args, **kwargs)
        self.criterion.reduction = self.reduction
        if shape is not None and len(losses) == shape[0] * shape[1]:
            losses = losses.view(shape[0], shape[1])
            if self.reduction == "sum":
                losses = losses.sum(1)
            else:
                targets = kwargs.get("target", args[1] if len(args) > 1 else None)
                ignored = getattr(self.criterion, "ignore_index", None)
                if targets is None or ignored is None:
                    losses = losses.mean(1)
                else:
                    losses = losses.sum(1) / (targets.view(losses.shape) != ignored).sum(1).clamp(min=1)
        return losses.mean() if self.reduction == "mean" else losses.sum()


def remove_sample_hooks(module: nn.Module) -> None:
    """Take what Opacus makes gradients of examples with off a model that is not wrapped (any more)."""
    for layer in module.modules():
        kept: dict[str, Any] = vars(layer)
        for handle in kept.pop("autograd_grad_sample_hooks", []):
            handle.remove()
        for name in ("activations", "max_batch_len", "ft_compute_sample_grad"):
            kept.pop(name, None)
    for p in module.parameters():
        for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:
            if hasattr(p, name):
                delattr(p, name)


def forget_samples(p: Any) -> None:
    """Remove what forward and backward passes have left at the parameter `p`."""
    p.grad_sample, p._forward_counter = None, 0
    if hasattr(p, "_current_grad_sample"):
        del p._current_grad_sample


def _used_once(module: nn.Module) -> bool:
    """Whether the gradients of the layer's parameters come from this one call of this one layer."""
    for p in module.parameters():
        if p.requires_grad and (p._forward_counter != 1 or hasattr(p, "_current_grad_sample")):  # type: ignore[attr-defined]
            return False
    return True


Factors = list[tuple[Any, PerSampleGradients]]


def _linear(layer: nn.Linear, activations: Tensor, backprops: Tensor) -> Factors:
    a = activations.to(backprops.dtype).reshape(len(activations), -1, layer.in_features) if len(activations) else None
    if a is None:
        a, b = activations.new_zeros(0, 1, layer.in_features), backprops.new_zeros(0, 1, layer.out_features)
    else:
        b = backprops.reshape(len(backprops), -1, layer.out_features)
    weight: PerSampleGradients = FactoredGradients(b, a)
    if a.shape[1] > 1 and layer.in_features * layer.out_features <= a.shape[1] * (
        layer.in_features + layer.out_features
    ):
        weight = DenseGradients(torch.bmm(b.mT, a))  # smaller than its factors
    rows: Factors = [(layer.weight, weight)]
    if layer.bias is not None:
        rows.append((layer.bias, DenseGradients(b.sum(1))))
    return rows


def _embedding(layer: nn.Embedding, activations: Tensor, backprops: Tensor) -> Factors:
    examples = len(activations)
    tokens = activations.reshape(examples, -1) if examples else activations.new_zeros(0, 1)
    example = torch.arange(examples, device=tokens.device)[:, None].expand_as(tokens)
    pairs, places = torch.unique(example * layer.num_embeddings + tokens, return_inverse=True)
    values = torch.zeros(len(pairs), layer.embedding_dim, dtype=backprops.dtype, device=backprops.device)
    values.index_add_(0, places.reshape(-1), backprops.reshape(-1, layer.embedding_dim))
    if layer.padding_idx is not None:
        values[pairs % layer.num_embeddings == layer.padding_idx] = 0
    return [
        (layer.weight, SparseGradients(pairs // layer.num_embeddings, pairs % layer.num_embeddings, values, examples))
    ]


class PlainModule(_SampleHooks, GradSampleModule):  # type: ignore[misc]
    """`opacus.GradSampleModule`, for any layer by functorch."""


class PlainHooks(_SampleHooks, GradSampleHooks):  # type: ignore[misc]
    """`PlainModule` without a wrapper around the model."""


class CompactModule(_SampleHooks, GradSampleModule):  # type: ignore[misc]
    """`opacus.GradSampleModule` with factors of embeddings, and convolutions that are not unfolded."""

    factors: ClassVar = {nn.Embedding: _embedding}


class CompactHooks(_SampleHooks, GradSampleHooks):  # type: ignore[misc]
    """`CompactModule` without a wrapper around the model."""

    factors: ClassVar = CompactModule.factors


class GhostModule(_SampleHooks, GradSampleModule):  # type: ignore[misc]
    """`CompactModule` with factors of linear layers too."""

    factors: ClassVar = {nn.Linear: _linear, nn.Embedding: _embedding}


class GhostHooks(_SampleHooks, GradSampleHooks):  # type: ignore[misc]
    """`GhostModule` without a wrapper around the model."""

    factors: ClassVar = GhostModule.factors


_WRAPPERS: dict[str, tuple[Any, Any]] = {
    "hooks": (CompactModule, CompactHooks),
    "functorch": (PlainModule, PlainHooks),
    "ghost": (GhostModule, GhostHooks),
    "ew": (GradSampleModuleExpandedWeights, None),
}
"""mode → (a wrapper, hooks without one)."""


def with_sample_gradients(module: Any, mode: str, *, batch_first: bool, loss_reduction: str, wrap_model: bool) -> Any:
    """`module`, so that its backward pass leaves per-sample gradients in `grad_sample`; a wrapper, or an object with its hooks.

    Raises:
        ValueError: for a mode that does not exist, or a module that is wrapped in another way.
    """
    if mode not in _WRAPPERS:
        raise ValueError(f"grad_sample_mode must be hooks, functorch, ew or ghost, got {mode!r}")
    wrapper, hooks = _WRAPPERS[mode]
    if isinstance(module, AbstractGradSampleModule):
        if type(module) is not wrapper and not (type(module) is GradSampleModule and mode in ("hooks", "functorch")):
            raise ValueError(
                f"the module is a {type(module).__name__} already, and grad_sample_mode {mode!r} needs another; give "
                "module.to_standard_module() instead"
            )
        if (module.batch_first, module.loss_reduction) != (batch_first, loss_reduction):
            raise ValueError("the module was wrapped with another batch_first or loss_reduction; unwrap it first")
        return module
    if not wrap_model and hooks is None:
        raise ValueError(f"grad_sample_mode {mode!r} needs a wrapper around the model; leave wrap_model out")
    remove_sample_hooks(module)
    for layer in module.modules():
        if type(layer).__module__.startswith("torch.nn") and getattr(layer, "inplace", False):
            layer.inplace = (
                False  # the same numbers: torch does not let the output of a layer with hooks be overwritten
            )
    options = {"force_functorch": True} if mode == "functorch" else {}
    return (wrapper if wrap_model else hooks)(module, batch_first=batch_first, loss_reduction=loss_reduction, **options)
