"""Tables about graded relevance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from visavis.cli.output.console import standard_output

if TYPE_CHECKING:
    from visavis.comparison.coherence import RankedLists
    from visavis.degrees.fitting import Fitted
    from visavis.degrees.judging import Judged
    from visavis.degrees.thresholds import Distribution
    from visavis.evaluation.agreement import Agreement
    from visavis.evaluation.rank_correlation import Correlation


JUDGEMENTS = {"expert": "expert judgements", "crowd": "crowd judgements", "cxc": "ratings of Crisscrossed Captions"}
PEOPLE = {"expert": "each expert with the mean of the other two", "crowd": "one answer with the others"}


def print_agreement(agreements: Iterable[Agreement]) -> None:
    console = standard_output()
    console.width = max(console.width, 120)
    for result in agreements:
        measures = {"sampled_spearman": "Spearman, sampled"} if result.judgements == "cxc" else {}
        measures |= {"kendall": "Kendall tau-b", "spearman": "Spearman"}
        table = Table(box=None, pad_edge=False)
        for column in ("", *measures.values()):
            table.add_column(column, no_wrap=bool(column), overflow="fold")
        rows = [(f"people ({PEOPLE[result.judgements]})", result.people)] if result.people else []
        rows += [*result.runs.items(), *((f"{run} less the first", values) for run, values in result.differences.items())]
        for name, values in rows:
            table.add_row(escape(name), *(_correlation(measure, values[measure]) for measure in measures))
        own = "with" if result.own_pairs else "without"
        console.print(
            f"[bold]{JUDGEMENTS[result.judgements]}[/bold], {own} own captions: {result.pairs:,} pairs, {result.images:,} images",
            soft_wrap=True,
        )
        console.print(table)
    console.print("Intervals: 95 % of 1,000 resamples of the images, the same for all.", soft_wrap=True)
    if result.judgements == "cxc":
        console.print("Sampled: mean ± deviation over 1,000 samples of half of the captions, each with one of its images.", soft_wrap=True)


def _correlation(measure: str, found: Correlation) -> str:
    if measure == "sampled_spearman":
        return f"{found.value:.3f} ± {found.deviation:.3f}"
    low, high = found.interval
    return f"{found.value:.3f} [{low:.3f}, {high:.3f}]"


def print_coherence(result: RankedLists) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("totally irrelevant")
    for title in ("text to image", "CS", "image to text", "CS"):
        table.add_column(title, justify="right", no_wrap=True)
    for index, ranker in enumerate(result.rankers):
        measured = [result.measured[way][index] for way in ("t2i", "i2t")]
        cells = [
            f"{mean.mean:.{digits}f}±{mean.half:.{digits}f}"
            for direction in measured
            for mean, digits in ((direction.irrelevant, 2), (direction.whole, 3))
        ]
        table.add_row(escape(ranker.name), *cells)
    console = standard_output()
    console.print(table)
    console.print(
        f"Of the first {result.top} of a list, means over all queries of split {result.split} with 95 % intervals; totally irrelevant: no more "
        f"relevant than {100 * result.scale.irrelevant:.4g} % of all candidates, by {escape(repr(result.degrees))}. CS: the coherent score "
        "of the whole list.",
        soft_wrap=True,
    )
    console.print(f"Report: {escape(str(result.folder / 'report.html'))}", soft_wrap=True)


def print_judged(rows: Sequence[Judged]) -> None:
    from visavis.degrees.judging import PAPER

    table = Table(box=None, pad_edge=False)
    for column in ("", *rows[0].pearson, "mean", "> 0.63", "captions/s", "s/million pairs"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        people = ["-" if r is None else f"{r:.3f} / {row.spearman[name]:.3f}" for name, r in row.pearson.items()]
        table.add_row(
            escape(row.degrees), *people, f"{row.mean:.2f}", f"{row.above:.1%}", f"{row.captions_per_s:,.0f}", f"{row.million_pairs_s:.3g}"
        )
    console = standard_output()
    console.width = max(console.width, 150)  # too wide is better than cut off
    console.print(table)
    console.print("Pearson / Spearman with human ratings; mean and share above 0.63 of random pairs of COCO captions.", soft_wrap=True)
    console.print("The paper's Pearson: " + "; ".join(f"{what} {value}" for what, value in PAPER.items()) + ".", soft_wrap=True)
    for note in dict.fromkeys(f"{row.degrees}: {note}" for row in rows for note in row.notes):
        console.print(escape(note), soft_wrap=True)


def print_distributions(rows: Sequence[Distribution]) -> None:
    for row in rows:
        _print_distribution(row)


def _print_distribution(row: Distribution) -> None:
    from visavis.degrees.thresholds import SHARES

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
        standard_output().print(line, soft_wrap=True)


def print_fitted(fitted: Fitted) -> None:
    console = standard_output()
    curve = ", ".join(f"{value:.3f}" for value in fitted.dev)
    console.print(
        f"Pearson on STS-B dev: {curve} (the first before training); of the best epoch on test {fitted.test:.3f}.", soft_wrap=True
    )
    console.print(escape(fitted.degrees), soft_wrap=True)
