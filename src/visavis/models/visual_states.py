"""What image encoders say, whatever their family: one vector a picture, and one a region."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def visual_output(model: nn.Module, pixels: Tensor) -> Any:
    """What the model says, its ``pooler_output`` filled: projected (CLIP), pooled, or the first token's state."""
    if hasattr(model, "get_image_features"):
        return model.get_image_features(pixel_values=pixels)  # type: ignore[operator]
    output = model(pixel_values=pixels)
    if output.pooler_output is None:
        output.pooler_output = output.last_hidden_state[:, 0]
    return output


def grid_of(states: Tensor, pixels: Tensor, model: nn.Module) -> Tensor:
    """Regions ``[N, R, D]`` of a feature map ``[N, D, h, w]`` or of tokens ``[N, L, D]`` without the special ones before."""
    if states.dim() == 4:
        return states.flatten(2).transpose(1, 2)
    config: Any = getattr(model, "config", None)
    patch = getattr(getattr(config, "vision_config", config), "patch_size", None)
    regions = (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch) if isinstance(patch, int) else states.shape[1]
    return states[:, -min(regions, states.shape[1]) :]
