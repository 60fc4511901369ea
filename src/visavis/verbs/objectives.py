"""Verbs about objectives alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from visavis.diagnosis.anatomy import Anatomy


def anatomy(objective: str | Sequence[str], *, out: str | Path | None = None) -> Anatomy:
    """What the gradient of objectives does with a triplet and what it turns, drawn without any data.

    objective: a spec such as "Unified(gamma=50)", or several. For each: the triplet diagram, the weights of the negative and the positive
    against their similarities, one step on a circle, and tangent norms as the hardest negative nears the query. out: a new folder for
    ``report.html``, a picture of each and ``anatomy.json``; default ``runs/anatomy-<n>``. Raises SpecError for an unknown objective.
    """
    from visavis import storage
    from visavis.diagnosis.anatomy import Anatomy, portraits_of
    from visavis.report.anatomy import write_report
    from visavis.report.figures import require_matplotlib

    require_matplotlib()
    portraits = portraits_of([objective] if isinstance(objective, str) else objective)
    with storage.begun_folder(out, "runs/anatomy") as folder:
        found = Anatomy(portraits, folder)
        write_report(found)
    return found
