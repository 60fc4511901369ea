"""The report of a comparison: what won, how sure that is, why, and what the best model finds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from visavis import storage
from visavis.comparison.queries import answers
from visavis.comparison.result import Comparison
from visavis.diagnosis.probes import Probes, probe_run
from visavis.diagnosis.walk import Diagnosis, diagnose_run
from visavis.errors import VisavisError
from visavis.progress import Progress, Silent
from visavis.report.choice.figures import differences_picture, sweep_picture
from visavis.report.choice.page import Pictures, page_of
from visavis.report.figures import DARK, LIGHT, Curve, Theme, curves_picture
from visavis.report.page import Shades
from visavis.report.thumbnails import Thumbnails
from visavis.training.run_files import RunFiles

DIAGNOSED = 8
"""Training batches on which the gradient of each choice is looked at."""


PROBED = 100
"""Test images on which the first run of each choice is probed."""


def write_report(comparison: Comparison, progress: Progress) -> None:
    """Leave ``report.html`` and ``curves.png`` in the comparison's folder, ``differences.png`` where something was compared, and
    ``sweep.png`` where settings differ in one number. Raises MissingExtra.
    """
    folder, found = comparison.folder, answers(comparison)
    curves = [Curve(setting.name, RunFiles(one.folder).read_log()) for setting in comparison.chosen for one in comparison.runs(setting)]
    pairs = [(pair, comparison.over_images.difference(pair.a, pair.b)) for pair in comparison.behind.values()]
    sweep = comparison.sweep
    pictures = Pictures(
        _drawn(folder / "curves.png", lambda theme: curves_picture(curves, theme)),
        _drawn(folder / "differences.png", lambda theme: differences_picture(pairs, theme)) if pairs else None,
        (sweep, _drawn(folder / "sweep.png", partial(sweep_picture, sweep))) if sweep else None,
    )
    diagnosed = {setting.name: _diagnosis(comparison, number, progress) for number, setting in enumerate(comparison.chosen)}
    probed = {setting.name: _probes(comparison, number, progress) for number, setting in enumerate(comparison.chosen)}
    thumbnails = None if found is None else Thumbnails(found.data)
    storage.write_text(folder / "report.html", page_of(comparison, pictures, diagnosed, probed, found, thumbnails))


def _drawn(file: Path, draw: Callable[[Theme], bytes]) -> Shades:
    """A picture for both themes, that for light pages also as a file."""
    shades = Shades(draw(LIGHT), draw(DARK))
    storage.write_bytes(file, shades.light)
    return shades


def _diagnosis(comparison: Comparison, number: int, progress: Progress) -> Diagnosis | None:
    """Of a choice's first run; None, and a sentence, for a model whose gradient cannot be looked at."""
    setting = comparison.chosen[number]
    progress.work("gradients", number, len(comparison.chosen), 0)
    try:
        return diagnose_run(comparison.runs(setting)[0].folder, [], DIAGNOSED, Silent())
    except VisavisError as error:
        progress.say(f"{setting.name} is not diagnosed in the report: {error}")
        return None


def _probes(comparison: Comparison, number: int, progress: Progress) -> Probes | None:
    """Of a choice's first run, its captions alone; None, and a sentence, for one that cannot be probed."""
    setting = comparison.chosen[number]
    progress.work("probes", number, len(comparison.chosen), 0)
    try:
        return probe_run(comparison.runs(setting)[0].folder, PROBED, Silent(), harmless=False)
    except VisavisError as error:
        progress.say(f"{setting.name} is not probed in the report: {error}")
        return None
