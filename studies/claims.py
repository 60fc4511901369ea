"""The papers' claims and the results of the study: ``docs/evidence/claims.toml`` and the raw figures become ``docs/research/claims.md``.

    python studies/claims.py [--check]

Every claim names its test and the runs that it is put to. Differences are paired by seed, with a 95 % interval by Student's t; where a
claim is one of several comparisons at once, these are corrected for one another by Holm. A claim *holds* where the whole interval is
on its side, *does not hold* where it is on the other, and *can't be told* where it is on both. ``--check`` says whether the page is
what the numbers say.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from study import EVIDENCE, PLAN, read_evidence
from verdicts import TESTS, Found, Missing, measured

from visavis.report.figures import LIGHT, dress, new_figure, png

DOCS = EVIDENCE.parents[1]
CLAIMS, PAGE, PICTURE = EVIDENCE.parent / "claims.toml", DOCS / "research" / "claims.md", DOCS / "images" / "claims.png"
PAPERS = {
    "U": "Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval (Li et al., 2022)",
    "L": "Ladder Loss for Coherent Visual-Semantic Embedding (Zhou et al., 2020)",
    "G": "Dissecting Deep Metric Learning Losses for Image-Text Retrieval, GOAL (Xuan and Chen, 2023)",
    "C": "Do Lessons from Metric Learning Generalize to Image-Caption Retrieval?, COCOS (Bleeker and de Rijke, 2022)",
    "O": "What this package believed of its own",
    "W": "The same in other worlds",
}


def page() -> str:
    claims = tomllib.loads(CLAIMS.read_text())["claims"]
    rows = [(claim, found(claim)) for claim in claims]
    lines = [INTRODUCTION.format(**_facts(), **_tally(rows)), ""]
    for letter, title in PAPERS.items():
        lines += [f"## {title}", "", "| | claim | in the paper | in the study | verdict |", "|---|---|---|---|---|"]
        for claim, told in rows:
            if claim["name"].startswith(letter):
                cells = (claim["name"], claim["says"], f"{claim['published']} ({claim['place']})", told.ours, f"**{told.verdict}**")
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        if letter == "C":
            lines += [f"![Recall against contributing samples, by objective](../images/{PICTURE.name})", ""]
    return "\n".join([*lines, *tables()]).rstrip() + "\n"


def found(claim: Mapping[str, Any]) -> Found:
    if "why_not" in claim:
        return Found(claim["why_not"], "not run")
    arguments = {key: value for key, value in claim.items() if key not in ("name", "says", "place", "published", "test")}
    try:
        return TESTS[claim["test"]](**arguments)
    except Missing as missing:
        return Found(f"{missing} has not been run yet", "not run")


def tables() -> list[str]:
    """Every experiment's test RSUM, and what else tells objectives apart."""
    plan = tomllib.loads(PLAN.read_text())["experiments"]
    lines = []
    for name, entry in plan.items():
        by_setting: dict[str, list[dict[str, Any]]] = {}
        for line in read_evidence(name):
            by_setting.setdefault(line["setting"], []).append(line)
        if not by_setting:
            continue
        rows = {setting: [line for line in own if "failure" not in line] for setting, own in by_setting.items()}
        failures = [f"{setting}: {line['failure']}" for setting, own in by_setting.items() for line in own if "failure" in line]
        lines += [f"## {entry['question']}", "", f"`python studies/study.py --only {name}`", "", *_table(rows, name), ""]
        lines += [f"- {failure}" for failure in failures] + ([""] if failures else [])
    return lines


COLUMNS = ("rsum", "R@1", "CS@100", "CS@1000", "tau with the experts", "C^q", "gap")


def _table(rows: Mapping[str, Sequence[dict[str, Any]]], name: str) -> list[str]:
    heads = ("", "RSUM", "R@1", "CS@100", "CS@1000", "people", "C^q", "gap", "with")
    lines = [f"| {' | '.join(heads)} |", f"|---{'|---:' * len(COLUMNS)}|---|"]
    order = sorted(rows, key=lambda setting: -_average(rows[setting], "rsum")) if name == "objectives" else rows
    for setting in order:
        if own := rows[setting]:
            cells = [_cell(own, column) for column in COLUMNS]
            overrides = own[0]["overrides"]
            spec, rate = overrides.get("phases.0.objective", ""), overrides["phases.0.optimizer.lr"]
            beside = "".join(f", `{overrides[key]}`" for key in ("recipe", "phases.0.supervision") if key in overrides)
            lines.append(f"| {setting} | {' | '.join(cells)} | `{spec}`, {rate:g}{beside} |")
    return lines


def _average(own: Sequence[dict[str, Any]], metric: str) -> float:
    return statistics.fmean([measured(line, metric) for line in own]) if own else -math.inf


def _cell(own: Sequence[dict[str, Any]], metric: str) -> str:
    """Mean and deviation; nothing where it was not measured, as people's ratings are not of drawn scenes."""
    try:
        values = [measured(line, metric) for line in own]
    except Missing:
        return ""
    digits = 1 if metric in ("rsum", "R@1", "C^q") else 3
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def scatter() -> bytes:
    """Test RSUM of every objective against its contributing samples, and against the effective number of its negatives."""
    figure, numbered = new_figure(8.6, 8.4, LIGHT), []
    by_objective: dict[str, list[dict[str, Any]]] = {}
    for line in read_evidence("objectives"):
        by_objective.setdefault(line["setting"], []).append(line)
    for axes, metric in zip(figure.subplots(2, 1), ("C^q", "effective negatives"), strict=True):
        dress(axes, f"RSUM against {metric}", LIGHT, f"{metric} of the best model, mean of both directions")
        axes.set_xscale("log")
        order = sorted(by_objective, key=lambda name: -_average(by_objective[name], "rsum"))
        spots = [(_average(by_objective[name], metric), _average(by_objective[name], "rsum")) for name in order]
        for place, (name, spot) in enumerate(zip(order, spots, strict=True), 1):
            spread = statistics.stdev([measured(line, "rsum") for line in by_objective[name]])
            axes.errorbar(*spot, spread, fmt="o", markersize=3.5, color=LIGHT.lines[1], linewidth=0.9)
            axes.text(1.03, 1.02 - place / len(order), f"{place}  {name}", transform=axes.transAxes, size=8, color=LIGHT.ink)
        numbered.append((axes, spots))
    figure.tight_layout()
    for axes, spots in numbered:
        _number(axes, spots)
    return png(figure)


def _number(axes: Any, spots: Sequence[tuple[float, float]]) -> None:
    """Write numbers from 1 beside points, once the axes have their limits: each on the side that is farthest from other points and numbers."""
    places = [tuple(place) for place in axes.transData.transform(spots) * 72 / axes.figure.dpi]
    sides = [(right, up) for right in (-9, 0, 9) for up in (-9, 0, 9) if right or up]
    taken = list(places)
    for number, (x, y) in enumerate(places, 1):
        room = {side: min(math.dist((x + side[0], y + side[1]), other) for other in taken if other != (x, y)) for side in sides}
        side = max(sides, key=room.__getitem__)
        taken.append((x + side[0], y + side[1]))
        axes.annotate(str(number), spots[number - 1], side, textcoords="offset points", ha="center", va="center", size=8, color=LIGHT.ink)


def _facts() -> dict[str, str]:
    made = [line for path in EVIDENCE.glob("*.jsonl") for line in read_evidence(path.stem)]
    return {"runs": f"{len(made):,}", "hours": f"{sum(line.get('seconds', 0) for line in made) / 3600:.1f}"}


def _tally(rows: Sequence[tuple[Any, Found]]) -> dict[str, int]:
    counted = [told.verdict for _, told in rows]
    return {
        "claims": len(rows),
        "held": counted.count("holds"),
        "failed": counted.count("does not hold"),
        "untold": counted.count("can't be told"),
        "unrun": counted.count("not run"),
    }


INTRODUCTION = """# What the papers claim, put to the test

Made by `python studies/claims.py` from the raw numbers of `python studies/study.py` under `docs/evidence/`: {runs} runs, {hours} core-hours of
training. Of {claims} claims {held} hold here, {failed} do not, {untold} can't be told; not run: {unrun}.

*Here* is a small world: two towers of two linear layers on stored features of Flickr8k (MobileNetV2, MiniLM), three epochs, batches of 256,
products in bfloat16 (two cores of an AMD EPYC with instructions for it). The papers trained attention models and fine-tuned CNNs on Flickr30K and
MS-COCO for ten times as long. A claim that does not hold here is not refuted there; it does not generalize to this. Every objective had the
same four tries on validation (`studies/study.toml`), with a seed that is used nowhere else; in other worlds (words from scratch, a model
that attends, drawn scenes) two or three rates were tried anew. What follows is of the test split. Differences are paired by seed, intervals
are of 95 %, each claim's by itself: of {claims} claims where there is nothing to find, about two would seem to hold or to fail by chance.

RSUM is the sum of six recalls in percent, C^q the negatives that push a query of the best model with a weight above 0.01
([diagnosis](../explanation/gradient-diagnostics.md)), CS@K by degrees of MiniLM, *people* Kendall's tau-b with the expert ratings of Flickr8k
([relevance](../explanation/graded-relevance.md)),
*gap* the mean cosine of validation pairs less that of the hardest negatives in a batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is what the numbers say")
    made = page()
    if not parser.parse_args().check:
        PAGE.write_text(made)
        PICTURE.write_bytes(scatter())
    elif not PAGE.exists() or PAGE.read_text() != made:
        sys.exit(f"{PAGE.name} is not what the numbers say: run python studies/claims.py.")


if __name__ == "__main__":
    main()
