"""The report of a comparison: what won, how sure that is, why, and what the best model finds."""

from __future__ import annotations

from visavis import storage
from visavis.comparison.queries import answers
from visavis.comparison.result import Comparison
from visavis.diagnosis.probes import Probes, probe_run
from visavis.diagnosis.walk import Diagnosis, diagnose_run
from visavis.errors import VisavisError
from visavis.progress import Progress, Silent
from visavis.report.choice.figures import differences_picture
from visavis.report.choice.page import page_of
from visavis.report.figures import DARK, LIGHT, Curve, curves_picture
from visavis.report.page import Shades
from visavis.report.thumbnails import Thumbnails
from visavis.training.run_files import RunFiles

DIAGNOSED = 8
"""Training batches on which the gradient of each choice is looked at."""


PROBED = 100
"""Test images on which the first run of each choice is probed."""


def write_report(comparison: Comparison, progress: Progress) -> None:
    """Leave ``report.html`` and ``curves.png`` in the comparison's folder, and ``differences.png`` where something was compared. Raises MissingExtra."""
    folder, found = comparison.folder, answers(comparison)
    curves = [Curve(setting.name, RunFiles(one.folder).read_log()) for setting in comparison.chosen for one in comparison.runs(setting)]
    learned = Shades(*(curves_picture(curves, theme) for theme in (LIGHT, DARK)))
    storage.write_bytes(folder / "curves.png", learned.light)
    differences = None
    if pairs := [(pair, comparison.over_images.difference(pair.a, pair.b)) for pair in comparison.behind.values()]:
        differences = Shades(*(differences_picture(pairs, theme) for theme in (LIGHT, DARK)))
        storage.write_bytes(folder / "differences.png", differences.light)
    diagnosed = {setting.name: _diagnosis(comparison, number, progress) for number, setting in enumerate(comparison.chosen)}
    probed = {setting.name: _probes(comparison, number, progress) for number, setting in enumerate(comparison.chosen)}
    thumbnails = None if found is None else Thumbnails(found.data)
    storage.write_text(folder / "report.html", page_of(comparison, differences, learned, diagnosed, probed, found, thumbnails))


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
