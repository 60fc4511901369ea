"""Candidates of a comparison without a list: every objective of the catalog that can be trained with
captions alone, with every recipe that the installed encoders allow.
"""

from __future__ import annotations

import torch

from visavis.core.errors import MissingSupervision
from visavis.losses.objectives import CATALOG
from visavis.losses.targets import Targets


def candidate_objectives() -> tuple[str, ...]:
    """List the objectives that need no annotation, with their defaults."""
    names = list[str]()
    for objective in CATALOG:
        try:
            objective()(torch.eye(4), Targets.paired(4))
        except MissingSupervision:
            continue
        names.append(f"{objective.__name__}()")
    return tuple(names)
