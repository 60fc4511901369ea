"""Tables about a run: trained, evaluated, diagnosed, searched."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from visavis.cli.output.console import standard_output
from visavis.cli.output.published import print_differences, print_report
from visavis.types import DIRECTIONS

if TYPE_CHECKING:
    from visavis.diagnosis.explanation import Explanation
    from visavis.diagnosis.walk import Diagnosis
    from visavis.evaluation import Coherence, Evaluation
    from visavis.runs.begin import Trained


def print_trained(trained: Trained) -> None:
    console = standard_output()
    if trained.test is not None:
        print_evaluation(trained.test)
    console.print(
        f"{escape(trained.objective)}, positives by {trained.targets}: "
        f"best RSUM {trained.validation_rsum:.1f} on validation ({trained.validation_images:,} images against all their captions), "
        f"at step {trained.best_step:,}; "
        f"training {trained.seconds:.0f} s, data and features {trained.cache_seconds:.0f} s.",
        soft_wrap=True,
    )
    for member in trained.members:
        told = f"{member.folder.name}: best RSUM {member.validation_rsum:.1f} on validation, at step {member.best_step:,}"
        console.print(escape(told if member.test is None else f"{told}; RSUM {member.test.metrics['rsum']:.1f} on test"), soft_wrap=True)
    console.print(f"Run folder: {escape(str(trained.folder))}", soft_wrap=True)


def print_evaluation(result: Evaluation) -> None:
    for evaluation in (result, *result.others):
        _print_protocol(replace(evaluation, report=result.report))
    if result.published is not None:
        print_differences(result)
    if result.base is not None:
        standard_output().print("The pretrained model:")
        print_evaluation(result.base)


def _print_protocol(result: Evaluation) -> None:
    m = result.metrics
    table = Table(box=None, pad_edge=False)
    for column in ("", "R@1", "R@5", "R@10", "median rank", "mean rank"):
        table.add_column(column, justify="left" if not column else "right")
    for way, title in DIRECTIONS.items():
        table.add_row(title, *(f"{m[f'{way}_r{k}']:.1f}" for k in (1, 5, 10)), f"{m[f'{way}_medr']:.0f}", f"{m[f'{way}_meanr']:.1f}")
    standard_output().print(table)
    standard_output().print(
        f"RSUM {m['rsum']:.1f}, average recall {m['average_recall']:.1f}  (protocol {result.protocol}: {result.num_images:,} images, "
        f"{result.num_texts:,} texts, {result.captions_per_image:g} captions an image; ties {result.ties})",
        soft_wrap=True,
    )
    if result.report:
        print_report(result)
    queries = len(result.image_ranks), len(result.text_ranks)
    if queries[0] < result.num_images or queries[1] < result.num_texts:
        standard_output().print(
            f"R-Precision {m['i2t_r_precision']:.3f} and {m['t2i_r_precision']:.3f}, mAP@R {m['i2t_map_at_r']:.3f} and "
            f"{m['t2i_map_at_r']:.3f} of {queries[0]:,} images and {queries[1]:,} texts whose right answers are listed",
            soft_wrap=True,
        )
    if result.coherence is not None:
        _print_coherence(result.coherence)


def _print_coherence(result: Coherence) -> None:
    from visavis.metrics import GRADED

    measures = [(metric, k) for metric in GRADED[result.semantics] for k in result.ks]
    table = Table(box=None, pad_edge=False)
    for column in ("", *(metric.label.replace("K", str(k)) for metric, k in measures)):
        table.add_column(column, justify="left" if not column else "right")
    for way, title in DIRECTIONS.items():
        for name, means in ((title, result.metrics), ("  random scores", result.random)):
            numbers = [means[metric.key(way, k)] for metric, k in measures]
            table.add_row(name, *("undefined" if number is None else f"{number:.3f}" for number in numbers))
    standard_output().print(table)
    tau, captions = ("tau-b", "the first caption of each image") if result.semantics == "reference" else ("tau-a", "all captions")
    left_out = ", ".join(f"{name} {count:,}" for name, count in result.undefined.items() if count) or "none"
    standard_output().print(
        f"Degrees by {escape(result.degrees)}; CS is {tau} over the top K of {captions}: {result.candidates[0]:,} texts, {result.candidates[1]:,} images, "
        f"which no K exceeds. Queries left out as undefined (constant in the top K): {left_out}.",
        soft_wrap=True,
    )


def print_diagnosis(result: Diagnosis) -> None:
    from visavis.diagnosis.walk import MEASURES

    table = Table(box=None, pad_edge=False)
    for column in ("", *MEASURES.values()):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for count in result.counts:
        released = "" if count.semantics == "paper" else ", as the released code counts"
        at = f", epsilon {count.epsilon:g}" if len(result.epsilons) > 1 else ""
        table.add_row(f"[bold]{escape(count.objective.partition('(')[0])}[/bold]{at}{released}")
        for way, title in DIRECTIONS.items():
            table.add_row(f"  {title}", *(_spread(count.mean[f"{way}_{name}"], count.deviation[f"{way}_{name}"]) for name in MEASURES))
    console = standard_output()
    console.width = max(console.width, 120)  # too wide is better than cut off
    console.print(table)
    console.print(
        f"C^q: negatives that push a query (weight above {', '.join(f'{epsilon:g}' for epsilon in result.epsilons)}), a mean over queries that have "
        "one, then over all; C^B: of all queries of a batch; C^0: queries that none pushes; W-, W+: summed weights of those negatives and of "
        "positives; effective: how many negatives share the push, whatever epsilon.",
        soft_wrap=True,
    )
    console.print(
        f"{_point(result)}, frozen; mean ± deviation over {result.batches:,} training batches of {result.images:,} images and "
        f"{result.texts:,} texts; {escape(', '.join(dict.fromkeys(count.objective for count in result.counts)))}.",
        soft_wrap=True,
    )
    if result.published:
        _print_published(console, result)


def _point(result: Diagnosis) -> str:
    told = {"best": "Best model", "last": "Last model", "start": "Untrained model"}.get(result.at, "Checkpoint")
    return f"{told}, step {result.step:,}"


def _print_published(console: Console, result: Diagnosis) -> None:
    """The figures of a paper beside those of the run: as the paper defines them, and as its released code counts."""
    from visavis.diagnosis.walk import EPSILON, MEASURES

    own, beside = result.counts[0], result.beside
    if beside is None:
        console.print(escape(f"{result.published} has no figures for {own.objective}."), soft_wrap=True)
        return
    released = next((count for count in result.counts if (count.objective, count.semantics) == (own.objective, "reference")), None)
    table = Table(box=None, pad_edge=False)
    for column in ("", "", "published", "reached", "reached, as the released code counts"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for key, (mean, deviation) in beside.values.items():
        way, _, measure = key.partition("_")
        otherwise = _spread(released.mean[key], released.deviation[key]) if released else "-" if beside.caution else "the same"
        table.add_row(
            DIRECTIONS[way], MEASURES[measure], _spread(mean, deviation or 0.0), _spread(own.mean[key], own.deviation[key]), otherwise
        )
    console.print()
    console.print(table)
    console.print(
        f"Published: {escape(beside.address)}, number {beside.number}: {escape(beside.source)}. "
        f"Reached: {escape(result.model)}, {escape(result.data)}.",
        soft_wrap=True,
    )
    if result.epsilon != EPSILON:
        console.print(f"The published figures are at epsilon {EPSILON}, those reached at {result.epsilon:g}.", soft_wrap=True)
    if beside.caution:
        console.print(f"The published figures are as the released code counts: {beside.caution}.", soft_wrap=True)


def _spread(mean: float, deviation: float) -> str:
    return "-" if math.isnan(mean) else f"{mean:.2f}±{deviation:.2f}"


def print_explanation(explanation: Explanation) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("word", "score", "best region", "its share"):
        table.add_column(column, justify="left" if column == "word" else "right", overflow="fold")
    for word, score, best, row in zip(explanation.words, explanation.scores, explanation.best, explanation.weights, strict=True):
        place = (
            best + 1 if explanation.grid is None else "row {}, column {}".format(*(1 + part for part in divmod(best, explanation.grid[1])))
        )
        table.add_row(escape(word), f"{score:.3f}", str(place), f"{100 * row[best]:.0f} %")
    standard_output().print(table)
    standard_output().print(f"{explanation.model}, score {explanation.score:.4f}. Drawn: {escape(str(explanation.file))}", soft_wrap=True)
