"""Cost of a model at search time, and the limits that a user sets."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from visavis.core.encoded import Encoded
from visavis.core.errors import SpecError
from visavis.models.base import Matcher
from visavis.models.retriever import Retriever
from visavis.training.evaluation.ranked_split import first_images
from visavis.training.recipes.data_module import DataModule
from visavis.training.runs.open_run import set_threads

COSTED_IMAGES = 200
TIMED_QUERIES = 15


@dataclass(frozen=True)
class ModelCost:
    """Cost of a model at search time.

    Attributes:
        parameters: Number of parameters of the matcher, without frozen encoders.
        query_ms: Milliseconds to encode a text and score it with ``images`` images, on this machine
            with the threads of a run.
        item_bytes: Bytes of an encoded image in float32.
        images: Number of images of the timed queries.
    """

    parameters: int
    query_ms: float
    item_bytes: float
    images: int


@dataclass(frozen=True)
class CostLimits:
    """Limits of the models that a comparison may choose.

    Args:
        max_query_ms: Milliseconds of a query, measured before the trainings. Default: any.
        max_item_bytes: Bytes of an encoded image. Default: any.

    Raises:
        SpecError: If a limit is not positive.
    """

    max_query_ms: float | None = None
    max_item_bytes: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_query_ms", "max_item_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SpecError(
                    f"{name}: expected a positive number, got {value}. Pass one, or leave it out."
                )

    def allow(self, cost: ModelCost) -> bool:
        """Check whether a model is within the limits."""
        return (self.max_query_ms is None or cost.query_ms <= self.max_query_ms) and (
            self.max_item_bytes is None or cost.item_bytes <= self.max_item_bytes
        )


@torch.inference_mode()
def measure_cost(data_module: DataModule, matcher: Matcher) -> ModelCost:
    """Measure the cost of a model with the first images and texts of the validation split."""
    split = first_images(data_module.validation, COSTED_IMAGES)
    matcher = matcher.eval()
    visual, _ = data_module.encode(matcher, split)
    texts = data_module.loader(split).text
    retriever = Retriever(matcher, data_module.processor)

    def encode(number: int) -> Encoded:
        # Stored features have no encoder for a new text.
        if data_module.recipe.text.features:
            return matcher.encode_text(texts.read(np.array([number])))
        return retriever.encode_text([split.captions[number]])

    threads = torch.get_num_threads()
    set_threads(data_module.recipe)
    times = list[float]()
    for number in range(min(TIMED_QUERIES, len(split.captions))):
        started = time.perf_counter()
        matcher.score(visual, encode(number))
        times.append(1000 * (time.perf_counter() - started))
    torch.set_num_threads(threads)
    size = sum(tensor.numel() * tensor.element_size() for tensor in visual.tensors)
    count = len(split.images)
    parameters = sum(parameter.numel() for parameter in matcher.parameters())
    return ModelCost(parameters, statistics.median(times), size / count, count)
