"""A diagnosis as a page: what still moves a model, how that depends on epsilon, and how the model learned."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from visavis.diagnosis.walk import MEASURES, Count, Diagnosis
from visavis.environment import program, versions
from visavis.report import page
from visavis.report.figures import DARK, LIGHT, Curve, Theme, curves_picture, dress, new_figure, png
from visavis.report.page import Section, Shades
from visavis.training.run_files import RunFiles
from visavis.types import DIRECTIONS


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """The whole page; its curves are those of the run's log, where the model was trained here. Raises MissingExtra."""
    sections = [Section("What still moves it", page.table(("objective", *MEASURES.values()), _rows(diagnosis), _note(diagnosis)))]
    if len(diagnosis.epsilons) > 1:
        swept = Shades(*(epsilon_picture(diagnosis, theme) for theme in (LIGHT, DARK)))
        sections.append(Section("From which weight on", page.picture(swept, "Counts of contributing samples against epsilon.", _SWEPT)))
    if (files := RunFiles(diagnosis.run)).log.exists():
        curves = [Curve(diagnosis.counts[0].objective.partition("(")[0], files.read_log())]
        learned = Shades(*(curves_picture(curves, theme) for theme in (LIGHT, DARK)))
        sections.append(Section("How it learned", page.picture(learned, "Loss, RSUM and similarities over training steps.", _CURVES)))
    again = f"{program()} diagnose {shlex.quote(str(diagnosis.run))} --at {diagnosis.at}"
    sections += [
        Section("What the numbers mean", page.glossary(_GLOSSARY)),
        Section(
            "To repeat it",
            page.commands([("The numbers", f"{again} {' '.join(f'--epsilon {epsilon:g}' for epsilon in diagnosis.epsilons)}")]),
        ),
    ]
    lead = f"{diagnosis.model}, {diagnosis.data}, step {diagnosis.step:,} ({diagnosis.at}), by the gradient of its objective over the training set."
    made_by = ", ".join(f"{name} {version}" for name, version in versions().items())
    return page.page(f"visavis: {diagnosis.run.name} diagnosed", lead, sections, f"{diagnosis.run}. {made_by}.")


def epsilon_picture(diagnosis: Diagnosis, theme: Theme = LIGHT) -> bytes:
    """C^q over all queries, C^B and C^0 against epsilon, both directions averaged; a color an objective, its effective number dotted."""
    figure = new_figure(8.6, 3.1, theme)
    counts = [count for count in diagnosis.counts if count.semantics == "paper"]
    for place, (measure, title) in enumerate((("per_query", "C^q, all queries"), ("in_batch", "C^B"), ("idle", "C^0"))):
        axes = figure.add_axes((0.07 + 0.325 * place, 0.17, 0.262, 0.64))
        for number, objective in enumerate(dict.fromkeys(count.objective for count in counts)):
            own = sorted((count for count in counts if count.objective == objective), key=lambda count: count.epsilon)
            color, name = theme.lines[number % len(theme.lines)], objective.partition("(")[0]
            axes.plot(
                [count.epsilon for count in own], [_both(count, measure) for count in own], "o-", color=color, markersize=4, label=name
            )
            if measure == "per_query":
                axes.axhline(_both(own[0], "effective"), color=color, linestyle=":", linewidth=1.4)
        dress(axes, title, theme, "epsilon")
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        if not place:
            axes.legend(fontsize=8.5, frameon=False, labelcolor=theme.ink)
    return png(figure)


def _both(count: Count, measure: str) -> float:
    return (count.mean[f"i2t_{measure}"] + count.mean[f"t2i_{measure}"]) / 2


def _rows(diagnosis: Diagnosis) -> Iterator[list[str]]:
    for count in diagnosis.counts:
        told = f"{count.objective.partition('(')[0]}{', as released' if count.semantics == 'reference' else ''}, epsilon {count.epsilon:g}"
        for way, title in DIRECTIONS.items():
            figures = ((count.mean[f"{way}_{name}"], count.deviation[f"{way}_{name}"]) for name in MEASURES)
            yield [f"{told}, {title}", *("-" if math.isnan(mean) else f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in figures)]


def _note(diagnosis: Diagnosis) -> str:
    objectives = ", ".join(dict.fromkeys(count.objective for count in diagnosis.counts))
    return f"Frozen; mean ± deviation over {diagnosis.batches:,} training batches of {diagnosis.images:,} images and {diagnosis.texts:,} texts. {objectives}."


_SWEPT = "What counts as a contributing sample depends on epsilon where weights are graded; dotted: the effective number of negatives, which does not."
_CURVES = (
    "Loss (untrained = 1), RSUM, and the similarity of positives and of hardest negatives on the validation split: the whole of it, or, by logs of older "
    "runs, its first batches. Unified loss, figures 3 and 4."
)
_GLOSSARY = (
    ("C^q", "Negatives that push a query, weight above epsilon: a mean over the queries that have one, then over all."),
    ("C^B, C^0", "The same of all queries of a batch; queries that no negative pushes."),
    ("W-, W+", "The weights of those negatives, and of the positives; 1 is the most that one positive pair can give."),
    ("effective", "The effective number of negatives, (sum w)^2 / sum w^2: 1 if one has all the weight, n if n share it equally."),
)
