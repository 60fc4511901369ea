"""Further parts of an evaluation result, which a recipe or a user names."""

from __future__ import annotations

from abc import ABC, abstractmethod

from visavis.core.blocking import Score
from visavis.core.encoded import Encoded
from visavis.core.fields import validate_fields
from visavis.core.memory_budget import MemoryLimit
from visavis.core.own_code import named_by_user
from visavis.core.spec import parse
from visavis.data.dataset import Dataset
from visavis.evaluation.results import SectionResult


class ResultSection(ABC):
    """A further part of an evaluation result (base class), such as the coherence of the ranking with
    graded relevance.
    """

    def __post_init__(self) -> None:
        validate_fields(self)

    @abstractmethod
    def measure(
        self,
        visual: Encoded,
        text: Encoded,
        score: Score,
        data: Dataset,
        *,
        folds: int,
        memory: MemoryLimit,
    ) -> SectionResult:
        """Measure the section under one protocol.

        Args:
            visual: Encoded images, one for each image of ``data``.
            text: Encoded captions, one for each caption of ``data``.
            score: Score function of the model.
            data: The evaluated split, with the captions that the protocol ranks.
            folds: Number of folds of the protocol.
            memory: Memory of a block of scores.

        Returns:
            The result.
        """


def named_section(text: str) -> ResultSection:
    """Parse a section that the user names now, so that its code may run."""
    with named_by_user(text):
        return parse(text, (), ResultSection, "sections")
