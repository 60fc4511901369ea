"""The state of an optimizer as tensors by name: taken out, given back, and checked against the parameters it is of."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from visavis.errors import RunError

OF_PARAMETER: dict[type[Optimizer], tuple[str, ...]] = {
    Adam: ("exp_avg", "exp_avg_sq", "step"),
    AdamW: ("exp_avg", "exp_avg_sq", "step"),
    SGD: (),
}
"""What an optimizer that recipes name remembers of each parameter that it has moved; "step" is one number, the rest are like the parameter."""


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer as tensors by ``<parameter's name>.<name>``."""
    state = optimizer.state_dict()["state"]
    return {
        f"{parameter}.{name}": torch.as_tensor(value)
        for index, parameter in enumerate(_parameters(optimizer))
        for name, value in state.get(index, {}).items()
        if value is not None
    }


def restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give an optimizer what ``optimizer_tensors`` took of it, or of one over other parts or of another kind: each parameter finds its own,
    as far as this kind remembers it, laid out in memory as the parameter is: a fused step goes through both in the order of memory.
    """
    parameters = _parameters(optimizer)
    places = {parameter: index for index, parameter in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter, name = key.rsplit(".", 1)
        if parameter in places and name in OF_PARAMETER[type(optimizer)]:
            own = value if name == "step" else torch.empty_like(parameters[parameter]).copy_(value)
            state.setdefault(places[parameter], {})[name] = own
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def check_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor], steps: int, where: str) -> None:
    """Raise RunError if tensors are not the state of an optimizer over these parameters after so many steps.

    A parameter that no loss has reached yet has no state; after a step, some have.
    """
    names, parameters = OF_PARAMETER[type(optimizer)], _parameters(optimizer)
    expected = {f"{parameter}.{name}": parameters[parameter] for parameter in parameters for name in names}
    for key in sorted(tensors.keys() | {f"{key.rsplit('.', 1)[0]}.{name}" for key in tensors for name in names}):
        if key not in expected or key not in tensors:
            raise RunError(
                f"{where}: {key} is {'unknown' if key in tensors else 'missing'}, expected the state of {type(optimizer).__name__}."
            )
        wanted = [] if key.endswith(".step") else list(expected[key].shape)
        if list(tensors[key].shape) != wanted:
            raise RunError(f"{where}: {key} is of shape {list(tensors[key].shape)}, expected {wanted}.")
    if steps and expected and not tensors:
        raise RunError(f"{where} is empty, expected the state of {type(optimizer).__name__} after {steps:,} steps.")


def _parameters(optimizer: Optimizer) -> dict[str, Tensor]:
    """By name, in the order of the optimizer's own numbers."""
    named = (
        (name, parameter) for group in optimizer.param_groups for name, parameter in zip(group["param_names"], group["params"], strict=True)
    )
    return dict(named)
