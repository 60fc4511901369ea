"""Simulated device: its tensors are on the CPU, report another device, and raise an error when they
meet CPU tensors, as on a GPU.

Results equal those of the CPU. A tensor that a program does not move is found without a GPU. Inside
``elsewhere()`` tensors and modules can be moved to ``DEVICE``, as to any other device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

# The type that torch reserves for unknown devices.
DEVICE = torch.device("privateuseone", 0)
MAY_MIX = [
    "copy_",
    "_to_copy",
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_pack_padded_sequence",
    "_pad_packed_sequence",
    "gru",
]
"""Operations that accept CPU tensors next to others: copies, indices, and lengths of packed
sequences.
"""


class Elsewhere(Tensor):
    """A tensor that reports ``DEVICE``. ``inner`` is the tensor on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor):
        layout = {
            "strides": inner.stride(),
            "storage_offset": inner.storage_offset(),
            "dtype": inner.dtype,
            "device": DEVICE,
        }
        wrapper = Tensor._make_wrapper_subclass(cls, inner.size(), **layout)
        wrapper.inner = inner
        return wrapper

    def tolist(self) -> list:
        return self.inner.tolist()

    def numpy(self, **_: Any):
        raise TypeError("can't convert a tensor of another device to numpy: use Tensor.cpu() first")

    __array__ = numpy

    def __repr__(self) -> str:
        return f"Elsewhere({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply a function to the tensors of nested arguments. It takes a third of the time of torch's
    ``tree_map``.
    """
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(part, change) for part in value)
    return (
        {name: _map_tensors(part, change) for name, part in value.items()}
        if type(value) is dict
        else value
    )


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU, and report the device where the result would be."""
    name = func._schema.name.partition("::")[2]
    tensors: list[Tensor] = []
    inner_args, inner_kwargs = _map_tensors(
        (args, kwargs),
        lambda part: tensors.append(part) or (part.inner if isinstance(part, Elsewhere) else part),
    )
    on_device = any(isinstance(part, Elsewhere) for part in tensors)
    on_cpu = any(not isinstance(part, Elsewhere) and part.dim() for part in tensors)
    if name == "_has_compatible_shallow_copy_type":
        return not on_cpu
    if (
        on_device
        and on_cpu
        and (name not in MAY_MIX or ("index" in name and not isinstance(args[0], Elsewhere)))
    ):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{DEVICE} and cpu ({func})."
        )
    device = kwargs.get("device")
    result_on_device = on_device if device is None else torch.device(device).type == DEVICE.type
    if name == "copy_":
        result_on_device = isinstance(args[0], Elsewhere)
    inner_kwargs |= {} if device is None else {"device": torch.device("cpu")}
    result = FUSED.get(name, func)(*inner_args, **inner_kwargs)
    if not result_on_device:
        return result
    if name == "_pack_padded_sequence":
        return Elsewhere(result[0]), result[1]
    result = _map_tensors(result, Elsewhere)
    return return_and_correct_aliasing(func, args, kwargs, result) if on_device else result


def _gru_cell(inputs, hidden, state, inputs_bias=None, hidden_bias=None):
    inputs, hidden = (
        gates if bias is None else gates + bias
        for gates, bias in ((inputs, inputs_bias), (hidden, hidden_bias))
    )
    (reset, update, new), (hidden_reset, hidden_update, hidden_new) = (
        inputs.chunk(3, 1),
        hidden.chunk(3, 1),
    )
    reset, update = (reset + hidden_reset).sigmoid(), (update + hidden_update).sigmoid()
    new = (new + reset * hidden_new).tanh()
    return new + update * (state - new), torch.cat([reset, update, new, state, hidden_new], 1)


def _gru_cell_backward(gradient, workspace, has_bias):
    reset, update, new, state, hidden_new = workspace.chunk(5, 1)
    grad_new = gradient * (1 - update) * (1 - new**2)
    grad_reset, grad_update = (
        grad_new * hidden_new * reset * (1 - reset),
        gradient * (state - new) * update * (1 - update),
    )
    inputs, hidden = (
        torch.cat([grad_reset, grad_update, grad_new], 1),
        torch.cat([grad_reset, grad_update, grad_new * reset], 1),
    )
    return (
        inputs,
        hidden,
        gradient * update,
        *(part.sum(0) if has_bias else None for part in (inputs, hidden)),
    )


FUSED = {"_thnn_fused_gru_cell": _gru_cell, "_thnn_fused_gru_cell_backward": _gru_cell_backward}
"""Operations that the CPU lacks."""


@cache
def _register_device() -> None:
    """Register the device with torch, for the rest of this process."""
    _setup_privateuseone_for_python_backend("elsewhere")


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """Allow moving tensors to ``DEVICE``. Functions that bypass torch's dispatcher are replaced:
    tensors of numbers, autocast, safetensors.
    """

    def moved(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, device=None, **kwargs: (
            result
            if (result := function(*args, **kwargs)) is None or device is None
            else result.to(device)
        )

    def as_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda device="cpu", *args, **kwargs: function(
            "cpu" if device == DEVICE.type else device, *args, **kwargs
        )

    def from_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensors, *args: function(
            {name: tensor.cpu() for name, tensor in tensors.items()}, *args
        )

    _register_device()
    with pytest.MonkeyPatch.context() as patch, _Mode():
        replaced = {
            moved: ("tensor", "as_tensor"),
            as_on_cpu: ("is_autocast_enabled", "get_autocast_dtype", "autocast"),
        }
        for change, names in replaced.items():
            for name in names:
                patch.setattr(torch, name, change(getattr(torch, name)))
        patch.setattr(
            Tensor,
            "new_tensor",
            lambda self, data, dtype=None: torch.tensor(
                data, dtype=dtype or self.dtype, device=self.device
            ),
        )
        for name in ("save", "save_file"):
            patch.setattr(safetensors.torch, name, from_cpu(getattr(safetensors.torch, name)))
        yield DEVICE
