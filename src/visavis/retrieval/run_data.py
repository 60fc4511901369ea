"""The data of a run, as far as an index uses them: captions that calibrate its scores, and that a
correction of its queries learns from.

The caller of an index opens them, because search does not depend on training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from visavis.core.progress import Progress
    from visavis.evaluation.query_ranks import QueryRanks
    from visavis.losses.corrections import Correction


class RunData(Protocol):
    """The data on which a model was trained."""

    @property
    def validation_split(self) -> str:
        """Name of the validation split."""

    def captions(self, split: str, progress: Progress) -> Sequence[str]:
        """Read the captions of a split."""

    def scores(
        self, split: str, embedding_dim: int, progress: Progress
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute the scores of all captions of a split with all of its images, as the index does,
        and whether they belong together. Both are ``[texts, images]``.
        """

    def query_ranks(
        self, split: str, correction: Correction | None, bank: Sequence[str], progress: Progress
    ) -> QueryRanks:
        """Rank the images of a split for its captions. The correction learns from the bank."""


OpenRunData = Callable[[Path], RunData | None]
"""Opens the data of a model, given its folder or name. None: it is not a run.

The methods of the data raise a ``VisavisError`` if they cannot be read.
"""


def no_run_data(model: Path) -> None:
    """Open no data, so that scores are calibrated without captions."""
