"""Image and text encoder of a model as two graphs: from pixels and from token ids to unit vectors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visavis.core.encoded import Encoded
from visavis.core.errors import VisavisError, requires_extra
from visavis.models import all_models
from visavis.models.base import GlobalMatcher, get_vectors
from visavis.models.encoders.preprocessing import blank_image
from visavis.models.layers import GeneralizedPooling
from visavis.models.retriever import Retriever
from visavis.models.text_tower_export import (
    MAX_POOLED_ITEMS,
    TracedTextEncoder,
    example_tokens,
    reads_tokens,
)


class TracedImageEncoder(nn.Module):
    """Image side of a model, with the frozen encoder and the standardization of its processor.

    Args:
        model: The model.
    """

    def __init__(self, model: Retriever):
        super().__init__()
        processor = model.processor
        self.matcher = model.matcher
        self.standardization = processor.standardization
        self.crops = processor.visual_spec.crops
        reads_pixels = model.matcher.config.visual_granularity == "pixels"
        self.encoder = nn.Identity() if reads_pixels else processor.visual_encoder

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pixels [N, 3, H, W], or [N, 10, 3, H, W] for ten crops, to unit vectors [N, D]."""
        items = self.encoder(Encoded(pixels))
        items = items.map(lambda part: part.mean(1)) if self.crops > 1 else items
        items = items if self.standardization is None else self.standardization(items)
        return get_vectors(self.matcher.first_stage_items(self.matcher.encode_visual(items)))


def check_exportable(model: Retriever) -> None:
    """Check that a model has one vector per item and reads images and texts."""
    if not model.matcher.score_is_cosine or model.matcher.rerank_top_k:
        kinds = [
            name
            for name, kind in all_models().items()
            if issubclass(kind, GlobalMatcher) and kind.score is GlobalMatcher.score
        ]
        raise VisavisError(
            f"run: expected a model with one vector per item to export ({', '.join(kinds)}), got "
            f"{model.matcher.name}, which scores pairs. "
            "Export one of these models and re-rank its results with this one."
        )
    if model.processor.items is not None:
        raise VisavisError(
            "run: expected a model of images and texts to export, got one that encodes only texts, "
            f"for the item vectors {model.processor.items}. Search with their index."
        )
    if model.processor.frames_per_second or model.matcher.config.visual_granularity == "experts":
        raise VisavisError(
            f"run: expected a model of single images to export, got {model.matcher.name}, which "
            "reads clips. Export a model of images."
        )
    if model.processor.visual_spec.random_crops:
        raise VisavisError(
            "run: expected a model without random crops (visual.random_crops) to export, got one "
            "with them. Train without."
        )
    if not reads_tokens(model.processor):
        # Raises RunError for a processor of stored features.
        _ = model.processor.text_encoder


def example_pixels(model: Retriever, count: int = 3) -> Tensor:
    """Return preprocessed pixels of blank images, as the image encoder reads them."""
    images = [blank_image()] * count
    if model.matcher.config.visual_granularity == "pixels":
        return model.processor.preprocess(images)
    return get_vectors(model.processor.visual_encoder.preprocess(images))


def trace_encoders(model: Retriever) -> dict[str, Any]:
    """Trace both encoders of a model with dynamic batch size and dynamic number of tokens. Each
    program holds an ONNX graph, and the same graph of ``torch.export``.
    """
    with requires_extra("export", "this format"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    for module in model.matcher.modules():
        if isinstance(module, GeneralizedPooling):
            module.tabulate_weights(MAX_POOLED_ITEMS)
    tokens = example_tokens(model)
    text_inputs = dict(zip(("ids", "mask"), tokens, strict=False))
    # Models with a fixed length pad every text to it.
    text_shape = {0: "batch"} if len(tokens) == 1 else {0: "batch", 1: "tokens"}
    return {
        "image": _trace(
            TracedImageEncoder(model), {"pixels": example_pixels(model)}, {"pixels": {0: "batch"}}
        ),
        "text": _trace(
            TracedTextEncoder(model), text_inputs, dict.fromkeys(text_inputs, text_shape)
        ),
    }


def _trace(module: nn.Module, inputs: dict[str, Tensor], shapes: dict[str, dict[int, str]]) -> Any:
    """Trace a module. Torch's exporter for ONNX also handles recurrent layers over a dynamic number
    of tokens, unlike ``torch.export``.
    """
    # Loops of recurrent layers are compiled, with sizes that an earlier trace may have fixed.
    torch.compiler.reset()
    with _hide_exporter_messages():
        try:
            return torch.onnx.export(
                module.eval(),
                tuple(inputs.values()),
                dynamic_shapes=tuple(shapes[name] for name in inputs),
                input_names=list(inputs),
                output_names=["embeddings"],
                dynamo=True,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise VisavisError(
                f"run: expected a {type(module).__name__} that torch can trace, got an error "
                f"({reason}). Export another model, or CLIP with the format hub."
            ) from error


@contextmanager
def _hide_exporter_messages() -> Iterator[None]:
    """Hide messages of torch's exporter about its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
