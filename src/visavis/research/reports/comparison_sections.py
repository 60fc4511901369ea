"""Further sections of the report of a comparison, which a user or an installed package adds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from visavis.core.own_code import loaded_classes
from visavis.core.table import Table


class ReportSection(ABC):
    """A section with a table of the settings of a comparison (base class), made without arguments.

    The report measures the first run of each setting, after it has written the other sections.

    Attributes:
        TITLE: Heading. The progress names it as well.
    """

    TITLE: ClassVar[str]

    @abstractmethod
    def measure(self, run: Path) -> Any:
        """Measure a run.

        Args:
            run: Run folder.

        Returns:
            Any result.

        Raises:
            VisavisError: If the run cannot be measured. The setting is left out with this message.
        """

    @abstractmethod
    def table(self, results: Mapping[str, Any]) -> Table:
        """Make the table of the section.

        Args:
            results: Result of `measure` by name of the setting, at least one.

        Returns:
            The table. Its notes are written above it.
        """


def report_sections() -> list[ReportSection]:
    """Return the sections of named sources and of installed packages."""
    return [kind() for kind in loaded_classes(ReportSection, "report_sections")]
