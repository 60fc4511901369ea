"""A stand-in for the GPU of an Apple computer: tensors that report ``mps`` and are computed on the
CPU.

They follow the rules that code for CPUs breaks: no float64, and no computation with a tensor of the
CPU that has dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

MPS = torch.device("mps", 0)


class FakeTensor(torch.Tensor):
    """A tensor on the stand-in, which holds its values on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        if inner.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return MPS

    def __repr__(self, **_: Any) -> str:
        return f"FakeTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        tensors = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_index = function._overloadname != "Tensor" or "index" in str(function)
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) and tensor.dim() and "copy_" not in str(function):
                assert is_index and tensor.dtype in (torch.long, torch.bool), (
                    f"{function} computes with tensors of the CPU and of mps"
                )
        inner_args, inner_kwargs = _pytree.tree_map(_inner, (args, kwargs or {}))
        results = _pytree.tree_map(_outer, function(*inner_args, **inner_kwargs))
        return return_and_correct_aliasing(function, args, kwargs or {}, results)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, FakeTensor) else value


def _outer(value: Any) -> Any:
    return FakeTensor(value) if isinstance(value, torch.Tensor) else value


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return FakeTensor(values.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _inner(gradient)


class _ToCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return _inner(values).detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return FakeTensor(gradient)


class _Moves(TorchFunctionMode):
    """Runs moves between devices and the creation of tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if function is torch.Tensor.cpu:
            return self._move(args[0], torch.device("cpu"))
        if function in (torch.Tensor.tolist, torch.Tensor.untyped_storage):
            return function(_inner(args[0]))
        if function is torch.Tensor.to:
            others = [*args[1:], *kwargs.values()]
            devices = [
                torch.device(other) if isinstance(other, str) else getattr(other, "device", other)
                for other in others
            ]
            target = next((x for x in devices if isinstance(x, torch.device)), args[0].device)
            dtypes = [getattr(other, "dtype", other) for other in others]
            dtype = next((x for x in dtypes if isinstance(x, torch.dtype)), args[0].dtype)
            if target.type == "mps" and dtype == torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
            values = self._move(args[0], target)
            return values if values.dtype == dtype else function(values, dtype)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "mps":
            return FakeTensor(function(*args, **{**kwargs, "device": "cpu"}))
        if device is None and str(getattr(function, "__name__", "")).startswith("new_"):
            kwargs = {**kwargs, "device": None}
        return function(*args, **kwargs)

    def _move(self, values: torch.Tensor, target: torch.device) -> torch.Tensor:
        if values.device.type == target.type:
            return values
        return (_ToDevice if target.type == "mps" else _ToCpu).apply(values)


@contextmanager
def fake_apple_gpu() -> Iterator[None]:
    """Give this machine the GPU of an Apple computer in this block."""
    with pytest.MonkeyPatch.context() as patch, _Moves():
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        patch.setattr(torch.mps, "recommended_max_memory", lambda: 2**33)
        patch.setattr(torch.mps, "current_allocated_memory", lambda: 2**30)
        state = torch.zeros(16, dtype=torch.uint8)
        patch.setattr(torch.mps, "get_rng_state", lambda device="mps": state)
        patch.setattr(torch.mps, "set_rng_state", lambda state, device="mps": None)
        patch.setattr(torch.mps, "device_count", lambda: 1)
        # Otherwise, Module.to would write into the parameters of the CPU.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
