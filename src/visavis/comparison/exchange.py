"""A table with its judgements for other programs: LaTeX with booktabs, and CSV with a line for each row and metric."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from visavis.comparison.bootstrap import Draws
from visavis.comparison.statistics import Paired, t_interval
from visavis.comparison.table import Row, Table

COLUMNS = (
    "row", "metric", "runs", "mean", "deviation", "low", "high",
    "against", "difference", "difference_low", "difference_high", "p", "adjusted_p", "tests", "verdict", "more_seeds",
    "images_low", "images_high",
)  # fmt: skip
"""Of the CSV. low, high: the 95 % interval of the mean over seeds. images_low, images_high: that of the difference over test images, or
over judged sentences where the metric is of these.
"""

_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}"}


def indistinct(against_best: Mapping[str, Paired]) -> list[str]:
    """The rows that a row cannot be told from, of what ``statistics.against`` gives."""
    return [name for name, pair in against_best.items() if pair.verdict in ("not distinguishable", "not tested")]


def latex(table: Table, alike: Mapping[str, Collection[str]] | None = None, label: str = "tab:comparison") -> str:
    r"""A ``table`` for LaTeX, which needs ``\usepackage{booktabs}``: the best means of each column in bold.

    alike: for each metric, the rows that cannot be told from its best, which get a dagger. label: for ``\ref``.
    """
    alike = alike or {}
    heads = " & ".join(rf"\multicolumn{{{len(group.labels)}}}{{c}}{{{group.head}}}" if group.head else "" for group in table.columns)
    ends = [*accumulate(len(group.labels) for group in table.columns)]
    rules = " ".join(
        rf"\cmidrule(lr){{{end - len(group.labels) + 2}-{end + 1}}}" for group, end in zip(table.columns, ends, strict=True) if group.head
    )
    names = " & ".join(label for group in table.columns for label in group.labels.values())
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escaped(table.caption())}{_legend(alike)}}}",
        rf"  \label{{{label}}}",
        rf"  \begin{{tabular}}{{l{'r' * len(table.metrics)}}}",
        r"    \toprule",
        rf"    & {heads} \\",
        f"    {rules}",
        rf"    & {names} \\",
        r"    \midrule",
        *(
            rf"    {escaped(row.name)} & {' & '.join(_cell(table, row, metric, alike) for metric in table.metrics)} \\"
            for row in table.rows
        ),
        r"    \midrule",
        rf"    chance & {' & '.join(f'{table.chance(metric):.1f}' for metric in table.metrics)} \\",
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def csv_text(table: Table, pairs: Mapping[str, Mapping[str, Paired]] | None = None, draws: Sequence[Draws] = ()) -> str:
    """CSV by ``COLUMNS``; what was not measured is empty.

    pairs: for each metric, what ``statistics.against`` gives for the row that all are set beside. draws: of the same rows, of any metrics.
    """
    pairs, text = pairs or {}, io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        for metric in table.metrics:
            pair = pairs.get(metric, {}).get(row.name)
            interval = t_interval(run[metric] for run in row.metrics)
            found = {
                "row": row.name,
                "metric": metric,
                "runs": len(row.metrics),
                "mean": row.mean(metric),
                "deviation": row.deviation(metric),
                **({"low": interval.low, "high": interval.high} if interval else {}),
            }
            writer.writerow(found | (_judged(pair, metric, draws) if pair else {}))
    return text.getvalue()


def escaped(text: str) -> str:
    r"""Text as LaTeX prints it.

    >>> print(escaped('Goal(pair="sig_ms") & 50 %'))
    Goal(pair="sig\_ms") \& 50 \%
    """
    text = re.sub(r"[\\~^<>]|([#$%&_{}])", lambda found: f"\\{found[0]}" if found[1] else _SPECIAL[found[0]], text)
    return text.replace("±", r"$\pm$").replace("−", "$-$").replace("γ", r"$\gamma$").replace("τ", r"$\tau$")


def _judged(pair: Paired, metric: str, draws: Sequence[Draws]) -> dict[str, object]:
    drawn = next((of_metric.difference(pair.a, pair.b, metric) for of_metric in draws if metric in of_metric.metrics), None)
    images = drawn and drawn.interval
    return {
        "against": pair.b,
        "difference": pair.difference,
        "p": pair.p,
        "adjusted_p": pair.adjusted_p,
        "tests": pair.tests,
        "verdict": pair.verdict,
        "more_seeds": pair.more_seeds,
        **({"difference_low": pair.interval.low, "difference_high": pair.interval.high} if pair.interval else {}),
        **({"images_low": images.low, "images_high": images.high} if images else {}),
    }


def _cell(table: Table, row: Row, metric: str, alike: Mapping[str, Collection[str]]) -> str:
    mean, deviation = f"{row.mean(metric):.1f}", row.deviation(metric)
    best = table.leads(row, metric)
    dagger = r"^{\dagger}" if row.name in alike.get(metric, ()) and not best else ""
    bold = rf"\mathbf{{{mean}}}" if best else mean
    spread = "" if deviation is None else rf" \pm {deviation:.1f}"
    return f"${bold}{dagger}{spread}$"


def _legend(alike: Mapping[str, Collection[str]]) -> str:
    if not any(alike.values()):
        return ""
    return r" $\dagger$: not distinguishable from the best of its column over these seeds (paired $t$-tests with Holm's correction)."
