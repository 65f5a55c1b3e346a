"""Per-example gradients of embedding layers, and of linear ones, kept as their factors: "ghost clipping" with one backward pass.

A table of embeddings has a gradient in those rows that an example looked up, and zeros, which are most of it, elsewhere. So the
rows alone are kept, and the factors of linear layers without sequences, also where sequences keep their gradients.

Opacus' own ghost clipping takes norms in a first backward pass and sums in a second one, which multiplies the losses. What it
adds is not what it measured (another criterion, other rounding, parameters that were frozen before), and one NaN spoils the sum.
Here both come from the same factors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.grad_sample.gsm_base import OPACUS_PARAM_MONKEYPATCH_ATTRS
from torch import Tensor, nn

from fedcgd.opacus.clipped_sum import FactoredGradients, Rows, SparseGradients

Sampler = Callable[[Any, list[Tensor], Tensor], dict[Any, Any]]
"""(layer, its inputs, gradients of its output) → the gradients of the examples for its parameters."""

MODES = ("hooks", "functorch", "ghost")


def _linear(
    layer: nn.Linear, activations: list[Tensor], backprops: Tensor, *, sequences: bool = True
) -> dict[Any, Rows]:
    """Factors, whether or not of `sequences`; of those only where the gradients are larger."""
    examples, inputs, outputs = len(backprops), layer.in_features, layer.out_features
    length = max(1, backprops.numel() // max(1, examples * outputs))
    a, b = (
        activations[0].to(backprops.dtype).reshape(examples, length, inputs),
        backprops.reshape(examples, length, outputs),
    )
    small = length > 1 and (not sequences or inputs * outputs <= length * (inputs + outputs))
    rows: dict[Any, Rows] = {}
    if layer.weight.requires_grad:
        # What is kept until the step is a copy: after the backward pass the program may use the memory of its inputs again.
        rows[layer.weight] = torch.bmm(b.mT, a) if small else FactoredGradients(b, a.clone())
    if layer.bias is not None:
        rows[layer.bias] = b.sum(1)
    return rows


def _embedding(layer: nn.Embedding, activations: list[Tensor], backprops: Tensor) -> dict[Any, Rows]:
    tokens, count = activations[0], layer.num_embeddings
    examples = len(tokens)
    tokens = tokens.reshape(examples, -1) if examples else tokens.new_zeros(0, 1)
    example = torch.arange(examples, device=tokens.device)[:, None].expand_as(tokens)
    pairs, places = torch.unique(example * count + tokens, return_inverse=True)
    values = backprops.new_zeros(len(pairs), layer.embedding_dim)
    values.index_add_(0, places.reshape(-1), backprops.reshape(-1, layer.embedding_dim))
    if layer.padding_idx is not None:
        values[pairs % count == layer.padding_idx] = 0
    return {layer.weight: SparseGradients(pairs // count, pairs % count, values, examples)}


_SHORT_FORMS: dict[str, dict[Any, Sampler]] = {
    "hooks": {nn.Linear: partial(_linear, sequences=False), nn.Embedding: _embedding},
    "functorch": {},
    "ghost": {nn.Linear: _linear, nn.Embedding: _embedding},
}


class _OwnHooks:
    """Opacus' hooks, which leave what `short_forms` return in `grad_sample` for the layers that have one.

    They also leave other gradients there without a copy, take a layer's input once where `torch.utils.checkpoint` (with
    use_reentrant=False) runs its forward pass again, and leave backward passes of a layer in eval mode alone.
    """

    mode = ""
    short_forms: dict[Any, Sampler]
    hooks_enabled: bool
    GRAD_SAMPLERS: dict[Any, Sampler]
    rearrange_grad_samples: Callable[..., tuple[list[Tensor], Tensor]]

    def _get_module_type(self, module: nn.Module) -> type[object]:
        """By which type Opacus looks for a sampler: its own one of LayerNorm asks for the bias."""
        return object if isinstance(module, nn.LayerNorm) and module.bias is None else type(module)

    def capture_activations_hook(self, module: nn.Module, forward_input: Any, _forward_output: Any) -> None:
        if _is_recomputing() or _is_copy(module):
            return
        if module.training and torch.is_grad_enabled() and type(module) not in self.GRAD_SAMPLERS:
            if odd := [type(t).__name__ for t in forward_input if not isinstance(t, Tensor)]:
                raise TypeError(
                    f"a {type(module).__name__} has parameters of its own and is given a {odd[0]}, and gradients of examples are "
                    "made of tensors alone: keep it as an attribute of the layer, or put the parameters into a layer of their own"
                )
            # Autograd refuses an input of the others that is overwritten before the backward pass: it keeps the same one.
            forward_input = [t.detach().clone() for t in forward_input]
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
        if not self.hooks_enabled or not _used_once(module):
            hook = super().capture_backprops_hook  # type: ignore[misc]
            hook(module, _forward_input, forward_output, loss_reduction, batch_first)
            return
        slopes = forward_output[0].detach()
        if loss_reduction == "sum":  # those of a mean are multiplied, which copies
            slopes = slopes.clone()  # the program may use their memory again
        activations, backprops = self.rearrange_grad_samples(
            module=module, backprops=slopes, loss_reduction=loss_reduction, batch_first=batch_first
        )
        del module.max_batch_len
        known = {} if hasattr(module, "ft_compute_sample_grad") else self.GRAD_SAMPLERS
        sampler = self.short_forms.get(type(module)) or known.get(type(module), ft_compute_per_sample_gradient)
        try:
            found = sampler(module, activations, backprops)
        except Exception as error:
            error.add_note(
                f"There are no gradients of examples of a {type(module).__name__} as this model uses it. Put parameters that are "
                "next to layers into a layer of their own; fedcgd.central.PrivateGradient trains nearly every model"
            )
            raise
        for parameter, rows in found.items():
            if parameter.requires_grad:
                parameter._forward_counter -= 1
                earlier = parameter.grad_sample
                parameter.grad_sample = (
                    rows if earlier is None else [*(earlier if isinstance(earlier, list) else [earlier]), rows]
                )


class SampleModule(_OwnHooks, GradSampleModule):  # type: ignore[misc]
    """`opacus.GradSampleModule` with `_OwnHooks`."""


class SampleHooks(_OwnHooks, GradSampleHooks):  # type: ignore[misc]
    """`SampleModule` without a wrapper around the model."""


def with_sample_gradients(
    module: Any, mode: str, *, batch_first: bool, loss_reduction: str, wrap_model: bool, copies: int = 1
) -> Any:
    """`module`, so that its backward pass leaves per-sample gradients in `grad_sample`; a wrapper, or an object with its hooks.

    Raises:
        ValueError: for a mode that does not exist, or a module that is wrapped in another way.
    """
    if mode not in MODES:
        raise ValueError(f"grad_sample_mode must be hooks, functorch or ghost, got {mode!r}")
    if type(module) is GradSampleModule:
        module = module._module  # it gets other hooks: Opacus' own keep what the program may overwrite
    if isinstance(module, AbstractGradSampleModule):
        if getattr(module, "mode", "") != mode:
            raise ValueError(
                f"the module is a {type(module).__name__} already, and grad_sample_mode {mode!r} needs another; give "
                "module.to_standard_module() instead"
            )
        if (module.batch_first, module.loss_reduction) != (batch_first, loss_reduction):
            raise ValueError("the module was wrapped with another batch_first or loss_reduction; unwrap it first")
    else:
        remove_sample_hooks(module)
        for layer in module.modules():
            if type(layer).__module__.startswith("torch.nn") and getattr(layer, "inplace", False):
                layer.inplace = False  # the same numbers: torch lets nobody overwrite the output of a layer with hooks
        kind: Any = SampleModule if wrap_model else SampleHooks
        module = kind(
            module, batch_first=batch_first, loss_reduction=loss_reduction, force_functorch=mode == "functorch"
        )
        module.mode = mode
    module.short_forms = _SHORT_FORMS[mode] if copies == 1 else {}  # of which no means can be taken
    return module


def _is_copy(module: nn.Module) -> bool:
    """Whether it is a layer of a copy of the private model, as one that averages weights is: hooks are copied, but no run."""
    for p in module.parameters():
        if p.requires_grad:
            return not hasattr(p, "_forward_counter")
    return False


def _is_recomputing() -> bool:
    """Whether a forward pass runs again in a backward pass, for what it did not keep: its input was taken the first time."""
    if torch.compiler.is_compiling():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def _used_once(module: nn.Module) -> bool:
    """Whether the gradients of the layer's parameters come from this one call of this one layer."""
    for p in module.parameters():
        if p.requires_grad and (p._forward_counter != 1 or hasattr(p, "_current_grad_sample")):  # type: ignore[attr-defined]
            return False
    return True


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
