"""The page of a comparison, section by section."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from visavis.comparison.bootstrap import Drawn
from visavis.comparison.queries import Answered, Answers
from visavis.comparison.result import Comparison
from visavis.comparison.statistics import Paired, number
from visavis.comparison.sweep import Sweep
from visavis.diagnosis.probes import Probes
from visavis.diagnosis.walk import Count, Diagnosis
from visavis.environment import program, versions
from visavis.metrics.recall import RSUM
from visavis.report import page
from visavis.report.page import Section, Shades, data_uri, escape
from visavis.report.thumbnails import Thumbnails

MEASURES = {
    "in_batch": "negatives that push, over all queries of a batch of 128",
    "idle": "queries that nothing pushes, of 128",
    "push": "summed weight of negatives of a query",
    "pull": "summed weight of positives of a query",
}
"""What of a diagnosis stands in the report, both directions averaged."""


@dataclass(frozen=True)
class Pictures:
    """Of a page. differences: None where nothing was compared. sweep: what one number does; None where not just one was varied."""

    curves: Shades
    differences: Shades | None
    sweep: tuple[Sweep, Shades] | None


def page_of(
    comparison: Comparison,
    pictures: Pictures,
    diagnosed: Mapping[str, Diagnosis | None],
    probed: Mapping[str, Probes | None],
    found: Answers | None,
    thumbnails: Thumbnails | None,
) -> str:
    """The whole page. diagnosed, probed: by the name of a setting."""
    table, about = comparison.table, {setting.name: setting.point for setting in comparison.chosen}
    sections = [Section("What won", _won(comparison)), Section("All results", page.comparison(replace(table, judged=None), about))]
    if pictures.differences is not None:
        sections.append(
            Section("How sure that is", page.picture(pictures.differences, _alt(comparison), _DIFFERENCES) + _pairs(comparison))
        )
    if comparison.judged is not None:
        sections.append(Section("What people judged", page.comparison(table, about, table.columns[-1:]) + _judged(comparison)))
    if pictures.sweep is not None:
        sweep, shades = pictures.sweep
        sections.append(Section(f"What {sweep.name} does", page.picture(shades, _sweep_alt(sweep), _SWEEP)))
    if any(diagnosed.values()):
        sections.append(Section("Why: what still moves each model", _diagnoses(diagnosed)))
    if any(probed.values()):
        sections.append(Section("What they do not understand", _probes({name: probes for name, probes in probed.items() if probes})))
    sections.append(Section("How they learned", page.picture(pictures.curves, _CURVES_ALT, _CURVES)))
    if found is not None and thumbnails is not None:
        sections += [
            Section("What the best finds", _answers(found.drawn, thumbnails, _DRAWN.format(len(found.drawn), found.run))),
            Section("Its hardest queries", _answers(found.hardest, thumbnails, _HARDEST)),
        ]
    sections += [Section("What the numbers mean", page.glossary(_GLOSSARY)), Section("To repeat it", page.commands(_commands(comparison)))]
    lead = f"{len(comparison.chosen)} ways to train on the same data, each with the same seeds, batches and steps: which is best, and how sure is that?"
    return page.page(f"visavis: {comparison.name} compared", lead, sections, _made_by(comparison), STYLE)


def _won(comparison: Comparison) -> str:
    best, runs = comparison.best, comparison.runs(comparison.best)
    row = next(row for row in comparison.table.rows if row.name == best.name)
    nearest = next(iter(comparison.behind.values()), None)
    facts = [
        (row.cell(RSUM.name), f"test RSUM of {best.name}, the best on validation"),
        (row.cell("t2i_r1"), "% of captions find their own image first"),
        (
            str(len(runs)),
            f"seed{'s' if len(runs) > 1 else ''}, {sum(one.seconds for one in comparison.outcomes) / 60:.0f} minutes of training in all",
        ),
    ]
    if nearest is not None:
        facts.append((number(nearest.difference, signed=True), f"RSUM ahead of the nearest, {nearest.b}: {nearest.verdict}"))
    return page.numbers(facts) + "".join(map(page.paragraph, comparison.sentences))


def _pairs(comparison: Comparison) -> str:
    heads = ("the best minus", "RSUM", "95 % over seeds", "95 % over images", "p (Holm)", "verdict", "seeds to settle it")
    rows = [_pair(pair.b, pair, comparison.over_images.difference(pair.a, pair.b)) for pair in comparison.behind.values()]
    return page.table(
        heads, rows, f"{len(comparison.pairs)} pairs were tested, and p is corrected for all of them, as the best was chosen among them."
    )


def _judged(comparison: Comparison) -> str:
    assert comparison.judged is not None
    rows = [
        _pair(f"{pair.b}: {label}", pair, comparison.over_sentences.difference(pair.a, pair.b, metric))
        for metric, label in comparison.judged.labels.items()
        for pair in comparison.judged_behind(metric).values()
    ]
    heads = ("the best minus", "percent", "95 % over seeds", "95 % over sentences", "p (Holm)", "verdict", "seeds to settle it")
    return page.table(heads, rows, _JUDGED) if rows else ""


def _pair(name: str, pair: Paired, drawn: Drawn) -> list[str]:
    more = "" if pair.more_seeds == 0 else "-" if pair.more_seeds is None else f"about {pair.more_seeds} more"
    return [
        name,
        number(pair.difference, signed=True),
        str(pair.interval or "-"),
        str(drawn.interval or "-"),
        "-" if pair.adjusted_p is None else f"{pair.adjusted_p:.3f}",
        pair.verdict,
        more,
    ]


def _diagnoses(diagnosed: Mapping[str, Diagnosis | None]) -> str:
    rows = [[name, *_counts(diagnosis.counts[0])] for name, diagnosis in diagnosed.items() if diagnosis is not None]
    batches = next(diagnosis.batches for diagnosis in diagnosed.values() if diagnosis is not None)
    note = (
        f"The first seed of each at its best weights, frozen, over {batches} training batches. A loss that few negatives push has little left to "
        "learn from; one that all push may listen to what is already right. visavis diagnose RUN tells more."
    )
    return page.table(("objective", *MEASURES.values()), rows, note)


def _counts(count: Count) -> list[str]:
    return [f"{(count.mean[f'i2t_{name}'] + count.mean[f't2i_{name}']) / 2:.2f}" for name in MEASURES]


def _probes(probed: Mapping[str, Probes]) -> str:
    by_kind: dict[str, dict[str, str]] = {}
    for name, probes in probed.items():
        for one in probes.slices:
            by_kind.setdefault(f"{one.title}, {one.cases} cases", {})[name] = f"{one.percent:.0f} % ({one.low:.0f} to {one.high:.0f})"
    rows = [[kind, *(cells.get(name, "-") for name in probed)] for kind, cells in by_kind.items()]
    any_of = next(iter(probed.values()))
    note = (
        "How often the first seed of each scores a true caption above the same with one edit that makes it false, with its 95 % interval; chance is "
        f"50 %, a tie counts as not understood. * the same words in another order. {any_of.images:,} test images; false by {any_of.source}. visavis "
        "probe RUN tells more."
    )
    return page.table(("what was edited", *probed), rows, note)


def _answers(answered: Iterable[Answered], thumbnails: Thumbnails, note: str) -> str:
    return page.paragraph(note, "note") + "\n".join(_strip(one, thumbnails) for one in answered)


def _strip(one: Answered, thumbnails: Thumbnails) -> str:
    items = "".join(_item(image, f"{score:.2f}", image == one.own, thumbnails) for image, score in one.images)
    if all(image != one.own for image, _ in one.images):
        items += _item(one.own, f"its own, at place {one.rank:,.0f}", True, thumbnails)
    note = f"its own at place {one.rank:,.0f}, mean of all seeds"
    return f'<h3><q>{escape(one.text)}</q> <span class="note">{note}</span></h3>\n<ol class="strip six">{items}</ol>'


def _item(image: int, told: str, right: bool, thumbnails: Thumbnails) -> str:
    name, jpeg = thumbnails.images[image].name, thumbnails.jpeg(image)
    seen = (
        f"<span>{escape(name)}</span>"
        if jpeg is None
        else f'<img src="{data_uri(jpeg, "jpeg")}" alt="{escape(name)}" width="128" height="128">'
    )
    mark = '<b>✓<span class="hidden"> its own</span></b> ' if right else ""
    return f"<li{' class=right' if right else ''}>{seen}<small>{mark}{escape(told)}</small></li>"


def _alt(comparison: Comparison) -> str:
    return "; ".join(f"{pair.b}: {number(pair.difference, signed=True)}, {pair.verdict}" for pair in comparison.behind.values())


def _sweep_alt(sweep: Sweep) -> str:
    """The means on validation and on test, value by value."""
    told = []
    for name, (validation, test) in sweep.curves.items():
        points = (f"{one.value:g}: {one.mean:.1f}, {other.mean:.1f}" for one, other in zip(validation, test, strict=True))
        told.append(f"{name or sweep.name}: {'; '.join(points)}")
    return f"RSUM on validation and on test. {'. '.join(told)}."


def _commands(comparison: Comparison) -> list[tuple[str, str]]:
    folder, best = shlex.quote(str(comparison.folder)), max(comparison.runs(comparison.best), key=lambda one: one.validation_rsum)
    seeds = max(one.seed for one in comparison.outcomes)
    return [
        ("More seeds, without training anything again", f"{program()} compare --resume {folder} --seeds {2 * seeds}"),
        ("One of the runs anew, from its own recipe", f"{program()} train {shlex.quote(str(best.folder / 'run.toml'))}"),
        ("What moves the best model, in full", f"{program()} diagnose {shlex.quote(str(best.folder))}"),
        ("Search with it", f"{program()} search {shlex.quote(str(best.folder))} 'what you look for'"),
    ]


def _made_by(comparison: Comparison) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"{comparison.folder}: {len(comparison.outcomes)} runs, whose recipes, logs and weights are in its folder runs. {packages}."


_DIFFERENCES = (
    "How far the best choice is ahead of each other one. Over seeds: would other random starts turn it round on these test images? Over images: would "
    "other test images turn it round for these very models? Neither contains the other."
)
_JUDGED = (
    "The best is that of the captions' validation: nothing was chosen by what people judged. p is corrected for all pairs of one measure. What nobody "
    "judged counts as not fitting, so that recalls are lower than the truth; the order of judged pairs knows no such doubt."
)
_SWEEP = (
    "Mean RSUM over seeds with its 95 % interval by t, of settings that differ in this number alone. Choose by the full line: what is best on the "
    "dashed one was not known when the choice was made. The two splits differ in size and difficulty, so their heights are not to be compared."
)
_CURVES = "Loss (of each objective's own kind, untrained = 1), RSUM and similarities on the validation split; a thin line a seed, a thick one their mean."
_CURVES_ALT = "Loss, RSUM and similarities of the validation split over training steps."
_DRAWN = "{} test captions, drawn at random and not picked by their result, with what {} puts first."
_HARDEST = "The captions whose own image is ranked last, by the mean over seeds. Some are mistakes of the model, some of the captions."
_GLOSSARY = (
    ("R@K, RSUM", "The share of queries, in percent, with a right answer among the first K; RSUM is the sum of all six."),
    ("chosen on validation", "Which setting is best was decided without the test split; the test then says what that choice is worth."),
    (
        "not distinguishable",
        "The paired t-test over seeds, corrected by Holm for all pairs, cannot tell the difference from luck; more seeds might.",
    ),
    ("seeds and images", "Two variances: other random starts, and other test images. More seeds shrink only the first."),
)
STYLE = """
.strip.six { grid-template-columns: repeat(6, 1fr); }
.strip li > span { display: grid; place-items: center; aspect-ratio: 1; border-radius: .6rem; background: var(--card); padding: .4rem;
  font-size: .75rem; overflow-wrap: anywhere; }
@media (max-width: 34rem) { .strip.six { grid-template-columns: repeat(3, 1fr); } }
"""
