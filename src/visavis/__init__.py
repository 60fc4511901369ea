"""visavis: train, evaluate, diagnose and use vision-language retrieval."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from visavis import api
from visavis.api import *  # noqa: F403 - the functions of api.__all__
from visavis.core import errors
from visavis.core.errors import *  # noqa: F403 - the errors of errors.__all__

if TYPE_CHECKING:
    from visavis.core.own_code import allow_code
    from visavis.losses.objectives import parse
    from visavis.losses.pair_loss import LearnedScale, PairLoss
    from visavis.losses.targets import Factors, Targets
    from visavis.models.retriever import Retriever

__version__ = "0.2.0"

__all__ = [
    "Factors",
    "LearnedScale",
    "PairLoss",
    "Retriever",
    "Targets",
    "__version__",
    "allow_code",
    "parse",
]
__all__ += errors.__all__
__all__ += api.__all__

_MODULES = {
    "Factors": "visavis.losses.targets",
    "LearnedScale": "visavis.losses.pair_loss",
    "PairLoss": "visavis.losses.pair_loss",
    "Retriever": "visavis.models.retriever",
    "Targets": "visavis.losses.targets",
    "allow_code": "visavis.core.own_code",
    "parse": "visavis.losses.objectives",
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
