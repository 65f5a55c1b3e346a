"""Around a model, or into it: what makes the gradients of examples in each mode."""

from typing import Any

from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule
from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights

from fedcgd.opacus.attachments import remove_sample_hooks
from fedcgd.opacus.ghost import CompactHooks, CompactModule, GhostHooks, GhostModule, PlainHooks, PlainModule

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
    options = {"force_functorch": True} if mode == "functorch" else {}
    return (wrapper if wrap_model else hooks)(module, batch_first=batch_first, loss_reduction=loss_reduction, **options)
