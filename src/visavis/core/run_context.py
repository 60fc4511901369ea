"""What all steps of one training share: where progress goes, and the processes that train together."""

from __future__ import annotations

from dataclasses import dataclass, field

from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.core.progress import NoProgress, Progress


@dataclass(frozen=True)
class RunContext:
    """What all steps of one training share. Its memory and device are keys of the recipe.

    Attributes:
        progress: Receives progress and messages.
        group: Processes that train together. Rank 0 writes files and reports.
    """

    progress: Progress = field(default_factory=NoProgress)
    group: ProcessGroup = ONE_PROCESS
