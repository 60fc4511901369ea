"""Write ``docs/papers/claims.md``: the claims of the papers, and the results of the study.

    python studies/claims.py [--check]

The input is ``docs/evidence/claims.toml`` and the raw numbers of the study. Each claim names one
place of one paper, what is measured in its place, and what the measure leaves out. Each names its
test and its runs. Differences are paired by seed, with a 95 % interval by Student's t. If a claim
makes several comparisons at once, they are corrected by Holm. A claim *holds* if the whole interval
is on its side, *does not hold* if the whole interval is on the other side, and is *undecided*
otherwise.

Two more verdicts are corrected for all claims: by Holm's method for the probability of any wrong
verdict, and by Benjamini and Hochberg for the share of wrong ones among the decided. ``--check``
reports whether the page matches the numbers.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from claim_places import OURS, REQUIRED
from claim_power import power_section
from confirm_claims import CLAIMS, again, planned_seeds
from scipy.stats import false_discovery_control
from study import EVIDENCE, PLAN, read_evidence
from verdicts import (
    TESTS,
    VERDICTS,
    ClaimResult,
    Missing,
    Verdict,
    measured,
)

from visavis.evaluation.statistics import SIGNIFICANCE_LEVEL, holm
from visavis.research.reports.html_report import LIGHT_THEME, figure_to_png, new_figure, style_axes

DOCS = EVIDENCE.parents[1]
PAGE = DOCS / "papers" / "claims.md"
FIGURE = DOCS / "images" / "claims.png"
COLUMNS = ("each claim alone", "corrected for all claims", "false discovery rate 5 %")
"""Columns of the verdicts of a claim."""
PAPERS = {
    "U": "Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval (Li et al., 2022)",
    "L": "Ladder Loss for Coherent Visual-Semantic Embedding (Zhou et al., 2020)",
    "G": "Dissecting Deep Metric Learning Losses for Image-Text Retrieval, GOAL (Xuan and Chen, 2023)",
    "C": "Do Lessons from Metric Learning Generalize to Image-Caption Retrieval?, COCOS (Bleeker and de Rijke, 2022)",
    "O": "Expectations of this package",
    "W": "The same claims in other settings",
}


def page() -> str:
    """The whole page."""
    rows = results()
    lines = [INTRODUCTION.format(**_run_totals(), **_tally(rows)), ""]
    for letter, title in PAPERS.items():
        section = [row for row in rows if row.claim["name"].startswith(letter)]
        label = "Expectation" if letter == "O" else "Paper"
        lines += [f"## {title}", "", *_summary(section), ""]
        for row in section:
            claim = row.claim
            lines += [f"### {claim['name']}: {claim['statement']}", ""]
            lines += [
                f"- **{label}.** {_place(claim)}: {claim['published']}.",
                f"- **Measure.** {_capital(claim['measure'])}.",
                f"- **Study.** {row.result.summary}",
                f"- **Verdict.** {_verdict(row)}: {claim['limits']}.",
                "",
            ]
        if letter == "C":
            lines += [
                f"![Recall against contributing samples, by objective](../images/{FIGURE.name})",
                "",
            ]
    lines += [*power_section(rows), "", *new_tests(rows), "", *tables()]
    return "\n".join(lines).rstrip() + "\n"


def _place(claim: Mapping[str, Any]) -> str:
    """The place in a paper, or the page or docstring of this package."""
    return claim["place"] if claim["paper"] == OURS else _capital(claim["place"])


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Row:
    """A claim with its result.

    Attributes:
        claim: The entry of ``claims.toml``.
        result: Its result, not corrected for other claims.
        any_wrong_p: p-value after Holm's correction for all claims, which bounds the probability of
            any wrong verdict.
        wrong_share_p: p-value after the correction of Benjamini and Hochberg, which bounds the
            share of wrong verdicts.
    """

    claim: Mapping[str, Any]
    result: ClaimResult
    any_wrong_p: float = 1.0
    wrong_share_p: float = 1.0

    def verdict(self, adjusted_p: float) -> Verdict:
        """The verdict at a corrected p-value."""
        decided = self.result.verdict == "not run" or adjusted_p <= SIGNIFICANCE_LEVEL
        return self.result.verdict if decided else "undecided"

    @property
    def verdicts(self) -> tuple[Verdict, Verdict, Verdict]:
        """The verdicts alone, without any wrong one, and with a share of wrong ones."""
        return (
            self.result.verdict,
            self.verdict(self.any_wrong_p),
            self.verdict(self.wrong_share_p),
        )


def corrected(rows: Sequence[Row]) -> list[Row]:
    """Add to each claim its p-values after the corrections for all claims that were tested."""
    p_values = [row.result.p for row in rows if row.result.verdict != "not run"]
    any_wrong, wrong_share = iter(holm(p_values)), iter(false_discovery_control(p_values))
    return [
        row
        if row.result.verdict == "not run"
        else replace(row, any_wrong_p=next(any_wrong), wrong_share_p=float(next(wrong_share)))
        for row in rows
    ]


def _verdict(row: Row) -> str:
    """The verdicts, up to what the measure leaves out, or what is missing for a run."""
    alone, any_wrong, wrong_share = row.verdicts
    if alone == "not run":
        return "not run. Missing"
    return (
        f"{alone} (p {row.result.p:.2g}). Corrected for all claims: {any_wrong} (p "
        f"{row.any_wrong_p:.2g}). False discovery rate 5 %: {wrong_share} (p "
        f"{row.wrong_share_p:.2g}). Left out"
    )


def results() -> list[Row]:
    """Every claim with its result and its corrected p-values."""
    return corrected(
        [Row(claim, evaluate_claim(claim)) for claim in tomllib.loads(CLAIMS.read_text())["claims"]]
    )


def new_results(rows: Sequence[Row]) -> list[Row]:
    """The claims of the plan of new tests, with results of the new runs, corrected for this plan."""
    planned = planned_seeds()
    return corrected(
        [
            Row(row.claim, evaluate_claim(again(row.claim)))
            for row in rows
            if row.claim["name"] in planned
        ]
    )


def final_verdicts(rows: Sequence[Row]) -> dict[str, Verdict]:
    """The corrected verdict of each claim: of its new test if that decides it."""
    verdicts = {row.claim["name"]: row.verdicts[1] for row in rows}
    return verdicts | {
        row.claim["name"]: row.verdicts[1]
        for row in new_results(rows)
        if row.verdicts[1] in ("holds", "does not hold")
    }


def new_tests(rows: Sequence[Row]) -> list[str]:
    """The section of the page with the tests of undecided claims on new runs."""
    planned = planned_seeds()
    new = new_results(rows)
    before = {row.claim["name"]: row for row in rows}
    undecided = sum(row.verdicts[1] == "undecided" for row in rows)
    left = sum(verdict == "undecided" for verdict in final_verdicts(rows).values())
    lines = [
        "## New tests of undecided claims",
        "",
        f"The cheapest {len(planned)} of the undecided claims were tested once more, with new runs alone. Claims and seeds were fixed before the first new run",
        "(`docs/evidence/confirmation.toml`). The tests are corrected by Holm's method for these claims, so the probability of any wrong verdict in the last",
        "column is again at most 5 %, and at most 10 % with the first tests. `python studies/confirm_claims.py` made the runs",
        "on two cores of an Intel Xeon with bfloat16 instructions.",
        "",
        f"**{undecided - left} of {len(planned)} claims are decided now. So {left} of {undecided} stay undecided.**",
        "",
        "| claim | each claim alone, before | new runs | p | corrected verdict |",
        "|---|---|---|---:|---|",
    ]
    for row in new:
        name = row.claim["name"]
        lines.append(
            f"| {name} | {before[name].verdicts[0]} | {row.result.summary} | {row.any_wrong_p:.2g} | "
            f"{row.verdicts[1]} |"
        )
    return lines


def _summary(rows: Sequence[Row]) -> list[str]:
    """The names of the claims of a section, by verdict."""
    lines = [f"| verdict | {' | '.join(COLUMNS)} |", f"|---{'|---' * len(COLUMNS)}|"]
    for verdict in VERDICTS:
        cells = [
            ", ".join(row.claim["name"] for row in rows if row.verdicts[column] == verdict)
            for column in range(len(COLUMNS))
        ]
        if any(cells):
            lines.append(f"| {verdict} | {' | '.join(cells)} |")
    return lines


def evaluate_claim(claim: Mapping[str, Any]) -> ClaimResult:
    """The result of a claim's test."""
    if "test" not in claim:
        return ClaimResult("no runs", "not run")
    arguments = {
        key: value for key, value in claim.items() if key not in ("name", "test", *REQUIRED)
    }
    try:
        return TESTS[claim["test"]](**arguments)
    except Missing as missing:
        return ClaimResult(f"{missing} was not run yet", "not run")


def tables() -> list[str]:
    """The results of every experiment: recall, coherence, agreement with experts, contributing
    samples and gap.
    """
    plan = tomllib.loads(PLAN.read_text())["experiments"]
    lines = []
    for name, entry in plan.items():
        by_setting: dict[str, list[dict[str, Any]]] = {}
        for line in read_evidence(name):
            by_setting.setdefault(line["setting"], []).append(line)
        if not by_setting:
            continue
        rows = {
            setting: [line for line in lines_of if "failure" not in line]
            for setting, lines_of in by_setting.items()
        }
        failures = [
            f"{setting}: {line['failure']}"
            for setting, lines_of in by_setting.items()
            for line in lines_of
            if "failure" in line
        ]
        lines += [
            f"## {entry['question']}",
            "",
            f"`python studies/study.py --only {name}`",
            "",
            *_table(rows, name),
            "",
        ]
        lines += [f"- {failure}" for failure in failures] + ([""] if failures else [])
    return lines


RESULTS = {
    "RSUM": "rsum",
    "R@1": "R@1",
    "CS@100": "CS@100",
    "CS@1000": "CS@1000",
    "experts": "tau with the experts",
}
TRAINING = {"C^q": "C^q", "gap": "gap"}
"""Columns of the two tables of an experiment, with the metric of each."""


def _table(rows: Mapping[str, Sequence[dict[str, Any]]], name: str) -> list[str]:
    """Two tables: the results on the test split, and how each setting was trained."""
    order = (
        sorted(rows, key=lambda setting: -_average(rows[setting], "rsum"))
        if name == "objectives"
        else rows
    )
    results = [f"|  | {' | '.join(RESULTS)} |", f"|---{'|---:' * len(RESULTS)}|"]
    training = [
        f"|  | {' | '.join(TRAINING)} | rate | objective |",
        f"|---{'|---:' * (len(TRAINING) + 1)}|---|",
    ]
    for setting in order:
        if runs := rows[setting]:
            results.append(
                f"| {setting} | {' | '.join(_cell(runs, metric) for metric in RESULTS.values())} |"
            )
            overrides = runs[0]["overrides"]
            spec = overrides.get("phases.0.objective", "")
            rate = overrides["phases.0.optimizer.lr"]
            more = "".join(
                f", `{overrides[key]}`"
                for key in ("recipe", "phases.0.supervision")
                if key in overrides
            )
            training.append(
                f"| {setting} | {' | '.join(_cell(runs, metric) for metric in TRAINING.values())} "
                f"| {rate:g} | `{spec}`{more} |"
            )
    return [*results, "", *training]


def _average(runs: Sequence[dict[str, Any]], metric: str) -> float:
    return statistics.fmean([measured(line, metric) for line in runs]) if runs else -math.inf


def _cell(runs: Sequence[dict[str, Any]], metric: str) -> str:
    """Mean and standard deviation. Empty if the metric was not measured: synthetic scenes have no
    expert ratings.
    """
    try:
        values = [measured(line, metric) for line in runs]
    except Missing:
        return ""
    digits = 1 if metric in ("rsum", "R@1", "C^q") else 3
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def scatter() -> bytes:
    """A plot of test RSUM against contributing samples and against effective negatives, for every
    objective.
    """
    figure = new_figure(8.6, 8.4, LIGHT_THEME)
    numbered = []
    by_objective: dict[str, list[dict[str, Any]]] = {}
    for line in read_evidence("objectives"):
        by_objective.setdefault(line["setting"], []).append(line)
    for axes, metric in zip(figure.subplots(2, 1), ("C^q", "effective negatives"), strict=True):
        style_axes(
            axes,
            f"RSUM against {metric}",
            LIGHT_THEME,
            f"{metric} of the best model, mean of both directions",
        )
        axes.set_xscale("log")
        order = sorted(by_objective, key=lambda name: -_average(by_objective[name], "rsum"))
        points = [
            (_average(by_objective[name], metric), _average(by_objective[name], "rsum"))
            for name in order
        ]
        for number, (name, point) in enumerate(zip(order, points, strict=True), 1):
            spread = statistics.stdev([measured(line, "rsum") for line in by_objective[name]])
            axes.errorbar(
                *point, spread, fmt="o", markersize=3.5, color=LIGHT_THEME.lines[1], linewidth=0.9
            )
            axes.text(
                1.03,
                1.02 - number / len(order),
                f"{number}  {name}",
                transform=axes.transAxes,
                size=8,
                color=LIGHT_THEME.foreground,
            )
        numbered.append((axes, points))
    figure.tight_layout()
    for axes, points in numbered:
        _number(axes, points)
    return figure_to_png(figure)


def _number(axes: Any, points: Sequence[tuple[float, float]]) -> None:
    """Number the points from 1. Each number is on the side that is farthest from other points and
    numbers. The axes need their limits first.
    """
    positions = [
        tuple(position) for position in axes.transData.transform(points) * 72 / axes.figure.dpi
    ]
    sides = [(right, up) for right in (-9, 0, 9) for up in (-9, 0, 9) if right or up]
    occupied = list(positions)
    for number, (x, y) in enumerate(positions, 1):
        clearance = {
            side: min(
                math.dist((x + side[0], y + side[1]), other)
                for other in occupied
                if other != (x, y)
            )
            for side in sides
        }
        side = max(sides, key=clearance.__getitem__)
        occupied.append((x + side[0], y + side[1]))
        axes.annotate(
            str(number),
            points[number - 1],
            side,
            textcoords="offset points",
            ha="center",
            va="center",
            size=8,
            color=LIGHT_THEME.foreground,
        )


def _run_totals() -> dict[str, str]:
    lines = [line for path in EVIDENCE.glob("*.jsonl") for line in read_evidence(path.stem)]
    return {
        "runs": f"{len(lines):,}",
        "hours": f"{sum(line.get('seconds', 0) for line in lines) / 3600:.1f}",
    }


def _tally(rows: Sequence[Row]) -> dict[str, Any]:
    counts = [Counter(row.verdicts[column] for row in rows) for column in range(len(COLUMNS))]
    table = "\n".join(
        f"| {verdict} | {' | '.join(str(count[verdict]) for count in counts)} |"
        for verdict in VERDICTS
    )
    untested = counts[0]["not run"]
    return {
        "claims": len(rows),
        "tested": len(rows) - untested,
        "untested": untested,
        "table": table,
    }


INTRODUCTION = """# Claims of the papers, tested

This page lists {claims} claims of papers and of this package. {tested} of them are tested with {runs} short training runs ({hours} core-hours).
The other {untested} are *not run*. Their entry names what is missing.

Each entry has the place of one paper with its printed figures, the measure of this study in its place, and what the measure leaves out.

| verdict | each claim alone | corrected for all claims | false discovery rate 5 % |
|---|---|---|---|
{table}

A claim *holds* if the whole 95 % interval is on its side. It *does not hold* if the whole interval is on the other side. Otherwise it is *undecided*.
The other columns correct for the {tested} tested claims:

- **Corrected for all claims** (Holm): the probability of any wrong verdict in this column is at most 5 %.
- **False discovery rate 5 %** (Benjamini and Hochberg): of the decided verdicts in this column, at most 5 % are wrong on average. Read it to choose
  claims for further tests.

[Power](#power-of-the-tests) lists the seeds that the undecided claims need. [New tests](#new-tests-of-undecided-claims) decide some of them.

`python studies/study.py` and `python studies/gradient_flow.py` make the runs. `python studies/claims.py` writes this page from their raw numbers
under `docs/evidence/`.
`python studies/recompute_claims.py` computes every claim again with independent code and reports differences.

## Method

The study is small:

- **Model.** Two encoders of two linear layers on stored features of Flickr8k (MobileNetV2, MiniLM).
- **Training.** Three epochs, batches of 256, matrix products in bfloat16, on two cores of an AMD EPYC with bfloat16 instructions.
- **Tuning.** Every objective had the same four tries on validation (`studies/study.toml`), with a seed that is used nowhere else.
- **SmoothAP.** As in its paper, a batch holds all five captions of each image. With five times the epochs, the number of steps is the same.
- **NCR.** One of three epochs is its warm-up. With ten epochs, two are, and the next four exclude pairs that are probably mislabeled.
- **Other settings.** With word embeddings trained from scratch, a cross-attention model or synthetic scenes, two or three learning rates were tried again.
- **GOAL.** On Flickr8k, all gradients have the rate that is best for (con, sig-ms). On synthetic scenes, they have the rate of `TripletHN`.

The papers trained attention models and fine-tuned CNNs on Flickr30K and MS-COCO, for ten times as long. If a claim does not hold here, this does
not refute it for the setting of the paper. It only shows that the claim does not generalize to this study.

Results are from the test split. Differences are paired by seed. Each 95 % interval is for one claim. Of {tested} claims without any effect,
about three would appear to hold or to fail by chance. So rely on a single claim only if its corrected verdict is not *undecided*.

| column | meaning |
|---|---|
| RSUM | sum of six recalls, in percent |
| C^q | negatives per query with a gradient weight above 0.01, for the best model |
| CS@K | coherent score by relevance values of MiniLM |
| experts | Kendall's tau-b with the expert ratings of Flickr8k |
| gap | mean cosine of validation pairs minus that of the hardest negatives in a batch |

See [gradient diagnostics](gradient-diagnostics.md) for C^q and [graded relevance](graded-relevance.md) for CS@K and
the expert ratings."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="Only report whether the page matches the numbers."
    )
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text)
        FIGURE.write_bytes(scatter())
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit(f"{PAGE.name}: the page does not match the numbers. Run python studies/claims.py.")


if __name__ == "__main__":
    main()
