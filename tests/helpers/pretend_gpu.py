"""A GPU that is not there: tensors that say they are on "cuda", compute on the CPU, and meet no tensor of another device.

What a machine without a GPU can find out of code for one: tensors of two devices in one operation, NumPy or machine code given
a device's memory, generators of the wrong device; and how often the host waits for a value. Not: kernels, their speed and bits.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ops = torch.ops.aten

_SEEN = torch.device("meta")
"""What torch's C++ is told that the device is: for CUDA's its autograd would look for streams."""

WAITS = {ops._local_scalar_dense.default, ops.equal.default, ops.nonzero.default}
"""Operations on a device's tensors whose results the host needs."""


class OnGpu(Tensor):
    """`inner` is the CPU tensor that holds the values."""

    inner: Tensor
    on: torch.device

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "OnGpu":
        assert type(inner) is Tensor, type(inner)
        assert inner.device.type == "cpu"
        empty = torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype, device="meta")
        made = Tensor._make_subclass(
            cls, empty, inner.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        made.inner, made.on = inner.detach(), device
        return made

    def is_shaped_like(self, inner: Tensor) -> None:
        """Take over the shape that an operation in place, such as `unsqueeze_`, has given to `inner`."""
        if (self.shape, self.stride()) != (inner.shape, inner.stride()):
            self.data = OnGpu(inner.detach(), self.on)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.on

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> Any:  # type: ignore[override]
        _ACTIVE[-1].waits["tolist"] += 1
        return self.inner.tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnGpu({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ACTIVE[-1].__torch_dispatch__(func, types, args, kwargs)  # where torch has switched modes off

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


_ACTIVE: list["PretendGpu"] = []


def _with_index(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device("cuda", device.index or 0) if device.type in ("cuda", "meta") else device


class PretendGpu(TorchDispatchMode):
    """While it is active. `waits` counts, by operation, how often the host waited; `copies` what went between the two."""

    def __init__(self) -> None:
        super().__init__(_dispatch_key=None)
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # else torch looks for a driver
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        devices = {leaf.device for leaf in leaves if isinstance(leaf, OnGpu)}
        wanted = _with_index(kwargs["device"]) if kwargs.get("device") is not None else None
        if not devices and (wanted is None or wanted.type != "cuda"):
            return func(*args, **kwargs)
        if len(devices) > 1:
            raise RuntimeError(f"{func} on {devices}: Expected all tensors to be on the same device")
        here = next(iter(devices), torch.device("cpu"))
        if func is torch.ops.prim.device.default:
            return _SEEN
        target = wanted or here
        self._check(func, leaves, here)
        if func in WAITS or (func is ops.index.Tensor and any(leaf.dtype == torch.bool for leaf in leaves[1:])):
            self.waits[str(func)] += 1
        generator = kwargs.get("generator")
        if generator is not None and target.type != generator.device.type:
            raise RuntimeError(f"{func} on {target} with a generator on {generator.device}")
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
            if wanted != here and leaves:
                self.copies["to the host" if wanted.type == "cpu" else "to the device"] += 1
        kwargs.pop("pin_memory", None)
        unwrapped = tree_map(lambda leaf: leaf.inner if isinstance(leaf, OnGpu) else leaf, (args, kwargs))
        if func is ops.copy_.default and isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu):
            self.copies["to the device" if isinstance(args[0], OnGpu) else "to the host"] += 1
        elif func is ops.detach.default:
            return OnGpu(args[0].inner, here)
        result = func(*unwrapped[0], **unwrapped[1])
        known = {id(leaf.inner): leaf for leaf in leaves if isinstance(leaf, OnGpu)}
        if target.type == "cpu" and wanted is not None:
            return result.clone() if any(result is leaf.inner for leaf in leaves if isinstance(leaf, OnGpu)) else result
        plain = {id(leaf) for leaf in leaves if not isinstance(leaf, OnGpu)}

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, OnGpu) or (id(leaf) in plain and wanted is None):
                return leaf
            if id(leaf) in known:
                known[id(leaf)].is_shaped_like(leaf)
                return known[id(leaf)]
            return OnGpu(leaf.clone() if id(leaf) in plain else leaf, target)

        return tree_map(wrapped, result)

    def _check(self, func: Any, leaves: list[Tensor], here: torch.device) -> None:
        """On CUDA too numbers may be on the host, and so may what is copied, and the indices of a device's tensor."""
        if func in (ops.copy_.default, ops._to_copy.default, ops.set_.source_Tensor):
            return
        apart = [leaf for leaf in leaves if not isinstance(leaf, OnGpu) and leaf.dim()]
        if not apart or here.type == "cpu":
            return
        indexes = func in (
            ops.index.Tensor,
            ops.index_put.default,
            ops.index_put_.default,
            ops._index_put_impl_.default,
        )
        if indexes and isinstance(leaves[0], OnGpu) and not any(leaf.is_floating_point() for leaf in apart):
            self.copies["to the device"] += 1  # indices
            return
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found {here} and cpu")


def _apply_and_tie(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, which keeps a parameter that two modules share one parameter, also where it becomes another object."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((part, name))
    _apply(module, fn, recurse)
    for (first, name), *others in places.values():
        for part, other in others:
            part._parameters[other] = first._parameters[name]
    return module


_apply = nn.Module._apply


@contextmanager
def pretend_gpu() -> Iterator[PretendGpu]:
    """A context in which torch has a GPU, "cuda:0"."""
    torch._C._ensureCUDADeviceGuardSet()  # without a driver it does nothing from now on
    with ExitStack() as stack:
        stack.callback(
            torch.__future__.set_overwrite_module_params_on_conversion,
            torch.__future__.get_overwrite_module_params_on_conversion(),
        )
        torch.__future__.set_overwrite_module_params_on_conversion(
            True
        )  # `data` of a parameter cannot become another kind
        for name, value in (
            ("is_available", lambda: True),
            ("current_device", lambda: 0),
            ("device_count", lambda: 1),
            ("get_device_name", lambda device=None: "a GPU that is not there"),
            ("synchronize", lambda device=None: None),
            ("get_rng_state", lambda device=None: torch.zeros(16, dtype=torch.uint8)),
            ("set_rng_state", lambda state, device=None: None),
            ("is_current_stream_capturing", lambda: False),  # asked by optimizers of PyTorch 2.11 and 2.12
            ("_lazy_init", lambda: None),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply_and_tie))
        # Opacus asks for autocast on what tensors under torch.func, too, say is their device.
        stack.enter_context(mock.patch.object(torch.amp, "autocast", return_value=nullcontext()))
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device="cuda") is made on the CPU, and moved
        _ACTIVE.append(stack.enter_context(PretendGpu()))
        stack.callback(_ACTIVE.pop)
        yield _ACTIVE[-1]
