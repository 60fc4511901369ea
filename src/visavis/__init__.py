"""visavis: train, evaluate, diagnose and use vision-language retrieval."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from visavis import api, errors
from visavis.api import *  # noqa: F403 - the functions of api.__all__
from visavis.errors import *  # noqa: F403 - the errors of errors.__all__

if TYPE_CHECKING:
    from visavis.models.retriever import Retriever
    from visavis.objectives import parse
    from visavis.pair_loss import LearnedScale, PairLoss
    from visavis.targets import Factors, Targets

__version__ = "0.2.0"

__all__ = ["Factors", "LearnedScale", "PairLoss", "Retriever", "Targets", "__version__", "parse"]
__all__ += errors.__all__
__all__ += api.__all__

_MODULES = {
    "Factors": "visavis.targets",
    "LearnedScale": "visavis.pair_loss",
    "PairLoss": "visavis.pair_loss",
    "Retriever": "visavis.models.retriever",
    "Targets": "visavis.targets",
    "parse": "visavis.objectives",
}
"""Modules of the public names that are imported on first use, so that ``visavis --help`` does not
import torch.
"""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'visavis' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
