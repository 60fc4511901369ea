"""What the command line draws: bars while it works, tables when it is done, thumbnails where a terminal can."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from visavis.watch import Moment

if TYPE_CHECKING:
    from visavis.data.check import CheckReport
    from visavis.diagnosis.walk import Diagnosis
    from visavis.environment import Fact
    from visavis.evaluation import Coherence, Evaluation
    from visavis.evaluation.agreement import Agreement
    from visavis.report.coherence.comparison import Comparison
    from visavis.retrieval.query import Hit
    from visavis.supervision.graded.agreement import Agreement as Judged
    from visavis.supervision.graded.fitting import Fitted
    from visavis.supervision.graded.thresholds import Distribution
    from visavis.training.running import Trained

LISTED = 200
"""Findings of one kind that are printed before the rest is counted; ``--json`` has them all."""

WAYS = {"i2t": "image to text", "t2i": "text to image"}
MEASURES = {"per_moved": "C^q", "per_query": "C^q of all", "in_batch": "C^B", "idle": "C^0", "push": "W-", "pull": "W+"}
"""What a diagnosis counts, and the signs of the COCOS paper for it."""


class Bars:
    """A Watch that draws on stderr: one bar a kind of work, one for training, where that is a terminal."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def say(self, sentence: str) -> None:
        self.console.print(escape(sentence), soft_wrap=True)

    def work(self, what: str, done: int, total: int, per_s: float) -> None:
        self._show(what, what, done, total, f"{done:,}/{total:,}" + (f"  {per_s:,.0f}/s" if per_s else ""))

    def step(self, moment: Moment) -> None:
        phase = f"phase {moment.phase + 1}/{moment.phases} " if moment.phases > 1 else ""
        rsum = "" if moment.rsum is None else f"  RSUM {moment.rsum:.1f}"
        note = f"loss {moment.loss:.4g}{rsum}  {moment.pairs_per_s:,.0f} pairs/s  {_duration(moment.seconds_left)} left"
        done = moment.epoch * moment.steps + moment.step
        self._show("training", f"{phase}epoch {moment.epoch + 1}/{moment.epochs}", done, moment.epochs * moment.steps, note)

    def _show(self, key: str, title: str, done: int, total: int, note: str) -> None:
        if key not in self.tasks:
            self.tasks[key] = self.progress.add_task(title, total=total, note=note)
        task = self.tasks[key]
        self.progress.update(task, description=title, completed=done, total=total, note=note, visible=done < total or key == "training")


def print_trained(trained: Trained) -> None:
    console = _console()
    if trained.test is not None:
        print_evaluation(trained.test)
    console.print(
        f"{escape(trained.objective)}, positives by {trained.targets}: "
        f"best RSUM {trained.validation_rsum:.1f} on the validation split (all its images against all its captions), at step {trained.best_step:,}; "
        f"training {trained.seconds:.0f} s, data and features {trained.cache_seconds:.0f} s.",
        soft_wrap=True,
    )
    console.print(f"Run folder: {escape(str(trained.folder))}", soft_wrap=True)


def print_evaluation(result: Evaluation) -> None:
    m = result.metrics
    table = Table(box=None, pad_edge=False)
    for column in ("", "R@1", "R@5", "R@10", "median rank", "mean rank"):
        table.add_column(column, justify="left" if not column else "right")
    for way, title in WAYS.items():
        table.add_row(title, *(f"{m[f'{way}_r{k}']:.1f}" for k in (1, 5, 10)), f"{m[f'{way}_medr']:.0f}", f"{m[f'{way}_meanr']:.1f}")
    _console().print(table)
    _console().print(
        f"RSUM {m['rsum']:.1f}, average recall {m['average_recall']:.1f}  (protocol {result.protocol}: {result.num_images:,} images, "
        f"{result.num_texts:,} texts, {result.captions_per_image:g} captions an image; ties {result.ties})",
        soft_wrap=True,
    )
    queries = len(result.image_ranks), len(result.text_ranks)
    if queries[0] < result.num_images or queries[1] < result.num_texts:
        _console().print(
            f"R-Precision {m['i2t_r_precision']:.3f} and {m['t2i_r_precision']:.3f}, mAP@R {m['i2t_map_at_r']:.3f} and "
            f"{m['t2i_map_at_r']:.3f} of {queries[0]:,} images and {queries[1]:,} texts whose right answers are listed",
            soft_wrap=True,
        )
    if result.coherence is not None:
        _print_coherence(result.coherence)


def _print_coherence(result: Coherence) -> None:
    measures = [(f"{key}_at_{k}", f"{name}@{k}") for key, name in (("cs", "CS"), ("ndcg", "nDCG")) for k in result.ks]
    table = Table(box=None, pad_edge=False)
    for column in ("", *(title for _, title in measures)):
        table.add_column(column, justify="left" if not column else "right")
    for way, title in (("i2t", "image to text"), ("t2i", "text to image")):
        for name, means in ((title, result.metrics), ("  random scores", result.random)):
            numbers = [means[f"{way}_{key}"] for key, _ in measures]
            table.add_row(name, *("undefined" if number is None else f"{number:.3f}" for number in numbers))
    _console().print(table)
    tau, captions = ("tau-b", "the first caption of each image") if result.semantics == "reference" else ("tau-a", "all captions")
    left_out = ", ".join(f"{name} {count:,}" for name, count in result.undefined.items() if count) or "none"
    _console().print(
        f"Degrees by {escape(result.degrees)}; CS is {tau} over the top K of {captions}: {result.candidates[0]:,} texts, {result.candidates[1]:,} images, "
        f"which no K exceeds. Queries left out as undefined (constant in the top K): {left_out}.",
        soft_wrap=True,
    )


def print_agreement(found: Iterable[Agreement]) -> None:
    console = _console()
    console.width = max(console.width, 120)
    for result in found:
        table = Table(box=None, pad_edge=False)
        for column in ("", "Kendall tau-b", "Spearman"):
            table.add_column(column, no_wrap=bool(column), overflow="fold")
        of_people = "each expert with the mean of the other two" if result.judgements == "expert" else "one answer with the others"
        rows = [(f"people ({of_people})", result.people), *result.runs.items()]
        rows += [(f"{run} less the first", values) for run, values in result.differences.items()]
        for name, values in rows:
            numbers = [values[measure] for measure in ("kendall", "spearman")]
            table.add_row(escape(name), *(f"{number.value:.3f} [{number.interval[0]:.3f}, {number.interval[1]:.3f}]" for number in numbers))
        own = "with" if result.own_pairs else "without"
        console.print(
            f"[bold]{result.judgements} judgements[/bold], {own} own captions: {result.pairs:,} pairs, {result.images:,} images",
            soft_wrap=True,
        )
        console.print(table)
    console.print("Intervals: 95 % of 1,000 resamples of the images, the same for all.", soft_wrap=True)


def print_diagnosis(result: Diagnosis) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", *MEASURES.values()):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for count in result.counts:
        released = "" if count.semantics == "paper" else ", as the released code counts"
        table.add_row(f"[bold]{escape(count.objective.partition('(')[0])}[/bold]{released}")
        for way, title in WAYS.items():
            table.add_row(f"  {title}", *(_spread(count.mean[f"{way}_{name}"], count.deviation[f"{way}_{name}"]) for name in MEASURES))
    console = _console()
    console.width = max(console.width, 120)  # rather too wide than cut
    console.print(table)
    console.print(
        f"C^q: negatives that push a query (weight above {result.epsilon:g}), a mean over queries that have one, then over all; C^B: of all "
        "queries of a batch; C^0: queries that none pushes; W-, W+: summed weights of those negatives and of positives.",
        soft_wrap=True,
    )
    console.print(
        f"Best model, step {result.step:,}, frozen; mean ± deviation over {result.batches:,} training batches of {result.images:,} images and "
        f"{result.texts:,} texts; {', '.join(escape(count.objective) for count in result.counts if count.semantics == 'paper')}.",
        soft_wrap=True,
    )
    if result.published:
        _print_published(console, result)


def _print_published(console: Console, result: Diagnosis) -> None:
    """The figures of a paper beside those of the run: as the paper defines them, and as its released code counts."""
    own, beside = result.counts[0], result.beside
    if beside is None:
        console.print(escape(f"{result.published} has no figures for {own.objective}."), soft_wrap=True)
        return
    released = next((count for count in result.counts if (count.objective, count.semantics) == (own.objective, "reference")), None)
    table = Table(box=None, pad_edge=False)
    for column in ("", "", "published", "reached", "reached, as the released code counts"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for key, figures in beside.values.items():
        way, _, measure = key.partition("_")
        otherwise = _spread(released.mean[key], released.deviation[key]) if released else "-" if beside.caution else "the same"
        table.add_row(WAYS[way], MEASURES[measure], _spread(*figures), _spread(own.mean[key], own.deviation[key]), otherwise)
    console.print()
    console.print(table)
    console.print(
        f"Published: {beside.source}, {beside.place}: {escape(beside.model)}, {beside.data}. "
        f"Reached: {escape(result.model)}, {escape(result.data)}.",
        soft_wrap=True,
    )
    if beside.caution:
        console.print(f"The published figures are as the released code counts: {beside.caution}.", soft_wrap=True)


def print_coherence(result: Comparison) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("totally irrelevant")
    for title in ("text to image", "CS", "image to text", "CS"):
        table.add_column(title, justify="right", no_wrap=True)
    for place, ranker in enumerate(result.rankers):
        measured = [result.measured[way][place] for way in ("t2i", "i2t")]
        cells = [
            f"{mean.mean:.{digits}f}±{mean.half:.{digits}f}" for one in measured for mean, digits in ((one.irrelevant, 2), (one.whole, 3))
        ]
        table.add_row(escape(ranker.name), *cells)
    console = _console()
    console.print(table)
    console.print(
        f"Of the first {result.top} of a list, means over all queries of split {result.split} with 95 % intervals; totally irrelevant: no more "
        f"relevant than {100 * result.scale.irrelevant:.4g} % of all candidates, by {escape(repr(result.degrees))}. CS: the coherent score "
        "of the whole list.",
        soft_wrap=True,
    )
    console.print(f"Report: {escape(str(result.folder / 'report.html'))}", soft_wrap=True)


def print_hits(hits: Iterable[Hit]) -> None:
    console = _console()
    for rank, hit in enumerate(hits, 1):
        console.print(f"{rank:2d}  {hit.score:.3f}  {escape(hit.name)}", soft_wrap=True)
        if hit.image.bytes is not None and console.is_terminal and console.color_system == "truecolor":
            console.print(_thumbnail(hit.image.open()))


def print_check(report: CheckReport) -> None:
    console = _console()
    by_kind: dict[str, list[Any]] = {}
    for finding in sorted(report.findings, key=lambda finding: not finding.loses):
        by_kind.setdefault(("" if finding.loses else "note: ") + finding.kind, []).append(finding)
    for kind, findings in by_kind.items():
        console.print(f"[bold]{escape(kind)}[/bold] ({len(findings):,})")
        for finding in findings[:LISTED]:
            console.print(f"  {escape(str(finding))}", soft_wrap=True)
        if len(findings) > LISTED:
            console.print(f"  ... and {len(findings) - LISTED:,} more: --json lists all")
    for split, count in report.splits.items():
        console.print(f"{split}: {count.images:,} images, {count.captions:,} captions")
    fewest, most = report.captions_per_image
    sizes = ", ".join(f"{size} ({count:,})" for size, count in sorted(report.image_sizes.items(), key=lambda item: -item[1])[:5])
    console.print(
        f"captions an image: {fewest} to {most}; duplicate captions: {report.duplicate_captions:,}; image sizes: {sizes or 'no images'}"
    )
    verdict = "All is well: training loses nothing." if report.ok else "Training would lose something: mend it, or train with --skip-bad."
    console.print(f"{verdict} ({report.layout}, {report.seconds:.1f} s)")


def print_relevance(rows: Sequence[Judged] | Sequence[Distribution]) -> None:
    from visavis.supervision.graded.agreement import PAPER
    from visavis.supervision.graded.agreement import Agreement as Judged

    agreements = [row for row in rows if isinstance(row, Judged)]
    distributions = [row for row in rows if not isinstance(row, Judged)]
    for distribution in distributions:
        _print_distribution(distribution)
    if distributions:
        return

    table = Table(box=None, pad_edge=False)
    for column in ("", *agreements[0].pearson, "mean", "> 0.63", "captions/s", "s/million pairs"):
        table.add_column(column, justify="right" if column else "left")
    for row in agreements:
        people = ["-" if r is None else f"{r:.3f} / {row.spearman[name]:.3f}" for name, r in row.pearson.items()]
        table.add_row(
            escape(row.degrees), *people, f"{row.mean:.2f}", f"{row.above:.1%}", f"{row.captions_per_s:,.0f}", f"{row.million_pairs_s:.3g}"
        )
    console = _console()
    console.width = max(console.width, 150)  # rather too wide than cut
    console.print(table)
    console.print("Pearson / Spearman with human ratings; mean and share above 0.63 of random pairs of COCO captions.", soft_wrap=True)
    console.print("The paper's Pearson: " + "; ".join(f"{what} {value}" for what, value in PAPER.items()) + ".", soft_wrap=True)
    for note in dict.fromkeys(f"{row.degrees}: {note}" for row in agreements for note in row.notes):
        console.print(escape(note), soft_wrap=True)


def _print_distribution(row: Distribution) -> None:
    from visavis.supervision.graded.thresholds import SHARES

    shares = ", ".join(f"{share:.0%} above {value:.3f}" for share, value in zip(SHARES, row.quantiles, strict=True))
    lines = [
        f"[bold]{escape(row.degrees)}[/bold]: {row.pairs:,} random training pairs of {escape(row.data)}",
        f"  mean {row.mean:.3f}; {row.above:.1%} above the paper's 0.63; {shares}",
        *(f"  L = {level}: {escape(ladder)}" for level, ladder in enumerate(row.ladders, start=2)),
        *(f"  {escape(note)}" for note in row.notes),
    ]
    if len(row.ladders) < len(SHARES):
        lines.append(f"  no thresholds for L = {len(row.ladders) + 2} and more: too many pairs have the same degree.")
    for line in lines:
        _console().print(line, soft_wrap=True)


def print_fitted(fitted: Fitted) -> None:
    console = _console()
    curve = ", ".join(f"{value:.3f}" for value in fitted.dev)
    console.print(
        f"Pearson on STS-B dev: {curve} (the first before training); of the best epoch on test {fitted.test:.3f}.", soft_wrap=True
    )
    console.print(escape(fitted.degrees), soft_wrap=True)


def print_findings(findings: Iterable[Fact]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark = "[green]ok[/green]" if finding.ok else "[red]![/red]"
        table.add_row(mark, escape(finding.name), escape(finding.value), escape(finding.remedy))
    _console().print(table)


def print_catalog(entries: dict[str, list[dict[str, str]]]) -> None:
    console = _console()
    for kind, rows in entries.items():
        console.print(f"[bold]{kind}[/bold]")
        for row in rows:
            (_, name), (_, what), *rest = row.items()
            console.print(f"  [cyan]{escape(name)}[/cyan]", soft_wrap=True)
            for text in filter(None, [what, *(f"{label}: {value}" for label, value in rest if value)]):
                console.print(f"      {escape(text)}", soft_wrap=True)


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False)


def _spread(mean: float, deviation: float) -> str:
    return "-" if math.isnan(mean) else f"{mean:.2f}±{deviation:.2f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def _thumbnail(picture: Any, width: int = 32) -> Any:
    """A picture in half blocks: two pixels a character cell."""
    from rich.text import Text

    small = picture.convert("RGB").resize((width, max(2, width * picture.height // picture.width // 2 * 2)))
    text = Text()
    for y in range(0, small.height, 2):
        for x in range(small.width):
            upper, lower = small.getpixel((x, y)), small.getpixel((x, y + 1))
            text.append("▀", style=f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})")
        text.append("\n")
    return text
