"""visavis: train, evaluate, diagnose and use vision-language retrieval."""

import sys

# ``python -m visavis`` puts the current folder first, which may be a folder of data with a
# ``typing.py``. While Python locates the module, the first argument is "-m".
if (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)].rpartition("m")[2] == "visavis"  # or -mvisavis
    and not sys.flags.safe_path
):
    del sys.path[0]

from typing import TYPE_CHECKING, Any

from visavis import api
from visavis.core import errors
from visavis.core.errors import *  # noqa: F403 - the errors of errors.__all__
from visavis.core.lazy_imports import lazy_names

if TYPE_CHECKING:
    from visavis.api import (  # noqa: F401 - names of api.__all__
        catalog,
        classify,
        compare,
        data_audit,
        data_check,
        data_convert,
        data_mine,
        data_scenes,
        demo,
        doctor,
        evaluate,
        explain,
        export,
        features,
        index,
        indexes_calibrate,
        indexes_compress,
        indexes_correct,
        indexes_default_model,
        indexes_evaluate,
        indexes_export,
        indexes_export_votes,
        indexes_list_queries,
        indexes_measure,
        indexes_move,
        indexes_prune,
        indexes_restore_queries,
        indexes_use_queries,
        load,
        mcp,
        mteb,
        papers_agreement,
        papers_anatomy,
        papers_board,
        papers_coherence,
        papers_convert,
        papers_diagnose,
        papers_evaluate,
        papers_list,
        papers_probe,
        papers_relevance,
        papers_relevance_fit,
        papers_relevance_thresholds,
        papers_reproduce,
        search,
        serve,
        train,
    )
    from visavis.core.own_code import allow_code
    from visavis.losses.objectives import parse
    from visavis.losses.pair_loss import LearnedScale, PairLoss
    from visavis.losses.targets import Factors, Targets
    from visavis.models.retriever import Retriever

__version__ = "0.3.0"

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

_LOSSES = {
    "Factors": "visavis.losses.targets",
    "LearnedScale": "visavis.losses.pair_loss",
    "PairLoss": "visavis.losses.pair_loss",
    "Targets": "visavis.losses.targets",
    "parse": "visavis.losses.objectives",
}
_MODULES = _LOSSES | {
    "Retriever": "visavis.models.retriever",
    "allow_code": "visavis.core.own_code",
    **dict.fromkeys(api.__all__, "visavis.api"),
}
"""Modules of the public names that are imported on first use, so that ``visavis --help`` does not
import torch, and a command does not import the functions of the others.
"""

_import_name = lazy_names(__name__, _MODULES, other_package="visavis.objectives")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. All but the losses need the extra ``train``."""
    if name in _MODULES.keys() - _LOSSES.keys():
        with errors.requires_extra("train", f"visavis.{name}"):
            import tomli_w  # noqa: F401 - the smallest package of the extra
    return _import_name(name)


def __dir__() -> list[str]:
    return __all__
