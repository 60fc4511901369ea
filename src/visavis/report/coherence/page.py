"""The report on coherence: how many of the top items are irrelevant, the lists themselves, and CS@K."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from visavis.comparison.lists import Item, Query, TopList
from visavis.comparison.measure import SHOWN, Mean
from visavis.environment import versions
from visavis.report import page
from visavis.report.coherence.style import STYLE
from visavis.report.page import Section, Shades, escape
from visavis.report.thumbnails import SIDE, Thumbnails
from visavis.types import DIRECTIONS, Direction

if TYPE_CHECKING:
    from visavis.comparison.coherence import RankedLists

HEADINGS: dict[Direction, str] = {"t2i": "Captions look for images", "i2t": "Images look for captions"}
TABLED = (100, 1000)
"""The K at which the table shows CS@K, besides the whole list."""

UNFOLDED = 10
"""How many captions of a list are shown before it is unfolded."""


def page_of(comparison: RankedLists, scores: Shades, thumbnails: Thumbnails) -> str:
    """The whole page. scores: the picture of CS@K."""
    runs = len(comparison.rankers) - 1
    sections = [Section(f"How much of the first {comparison.top} is irrelevant", _counts(comparison))]
    for way, heading in HEADINGS.items():
        if queries := [query for query in comparison.queries if query.way == way]:
            blocks = (_query(query, comparison, thumbnails) for query in queries)
            sections.append(Section(heading, "\n".join([_legend(comparison, way), *blocks])))
    sections += [
        Section("Is the whole list in order?", page.picture(scores, _alt(comparison), _CURVES) + _scores(comparison)),
        Section("What the numbers mean", page.glossary(_glossary(comparison))),
    ]
    lead = f"What {f'{runs} runs find' if runs > 1 else 'a run finds'} for the same queries: how relevant it is, and how much of it is not relevant at all."
    return page.page("visavis: how coherent are the lists?", lead, sections, _made_by(comparison), STYLE)


def _counts(comparison: RankedLists) -> str:
    measured, top = comparison.measured, comparison.top
    facts = [
        (f"{result.irrelevant.mean:.1f}", f"{ranker.name}: totally irrelevant of the first {top} images for a caption")
        for ranker, result in zip(comparison.rankers, measured["t2i"], strict=True)
    ]
    cells = [
        [mean for way in SHOWN for mean in (measured[way][place].irrelevant, measured[way][place].more if place else None)]
        for place in range(len(comparison.rankers))
    ]
    note = (
        f"Totally irrelevant among the first {top}: means over queries with their 95 % intervals, in which the captions of one image go "
        "together; another seed of the training is not in them."
    )
    heads = [f"of {top}", f"more than {comparison.rankers[0].name}"]
    table = _table(comparison, [heads, heads], cells, 2, note)
    return "\n".join([page.numbers(facts), page.paragraph(_threshold(comparison)), table, *map(page.paragraph, _warnings(comparison))])


def _threshold(comparison: RankedLists) -> str:
    data = comparison.data
    return (
        f"Totally irrelevant: no more relevant to the query than {_percent(comparison.scale.irrelevant)} of all candidates, by "
        f"{comparison.degrees!r}. Counted for all {len(data.captions):,} captions and all {len(data.images):,} images of split "
        f"{comparison.split} of {data.name}."
    )


def _warnings(comparison: RankedLists) -> list[str]:
    """Reasons to distrust the numbers of a run."""
    if not comparison.taught:
        return []
    taught, many = " and ".join(comparison.taught), len(comparison.taught) > 1
    sentence = (
        f"{taught} {'were' if many else 'was'} trained by the very degrees that measure here, so that {'they know' if many else 'it knows'} "
        "the measure: look at the lists, and at agreement with people, before you believe the numbers."
    )
    return [sentence]


def _scores(comparison: RankedLists) -> str:
    cuts = [k for k in comparison.measured["t2i"][0].scores if k in TABLED or k == len(comparison.data.images)]
    cells = [[comparison.measured[way][place].scores[k] for way in SHOWN for k in cuts] for place in range(len(comparison.rankers))]
    undefined = max(score.undefined for measured in comparison.measured.values() for result in measured for score in result.scores.values())
    left_out = (
        f"up to {undefined:,} queries of a mean have no value, since their first K degrees are all equal"
        if undefined
        else "every query has a value"
    )
    note = f"Means over queries, the first caption of each image alone, with their 95 % intervals; {left_out}. All K are in coherence.json."
    return _table(comparison, [[f"CS@{k:,}" for k in cuts]] * len(SHOWN), cells, 3, note)


def _table(comparison: RankedLists, heads: Sequence[Sequence[str]], cells: Sequence[Sequence[Mean | None]], digits: int, note: str) -> str:
    """A row for each ranker, a group of columns for each way."""
    ways = "".join(f'<th colspan="{len(group)}" scope="colgroup">{DIRECTIONS[way]}</th>' for way, group in zip(SHOWN, heads, strict=True))
    names = "".join(f'<th scope="col">{escape(name)}</th>' for group in heads for name in group)

    def cell(mean: Mean | None) -> str:
        return "<td>–</td>" if mean is None else f"<td>{_number(mean.mean, digits)}<small>±{mean.half:.{digits}f}</small></td>"

    rows = "\n".join(
        f'<tr><th scope="row">{escape(ranker.name)}<small>{escape(ranker.objective)}</small></th>{"".join(map(cell, row))}</tr>'
        for ranker, row in zip(comparison.rankers, cells, strict=True)
    )
    return f"""<div class="wide" tabindex="0" role="group" aria-label="numbers">
<table>
<thead>
<tr><th rowspan="2" scope="col">run</th>{ways}</tr>
<tr>{names}</tr>
</thead>
<tbody>
{rows}
</tbody>
</table>
</div>
{page.paragraph(note, "note")}"""


def _legend(comparison: RankedLists, way: Direction) -> str:
    own, all_ = ("the caption's own image", "images") if way == "t2i" else ("the image's own caption", "captions")
    shares = [f"{100 * share:.4g}" for share in comparison.scale.shares]
    steps = [*(f"{low} to {high} %" for low, high in pairwise(shares)), f"over {shares[-1]} %"]
    keys = [
        f'<li><b class="right">✓</b>{own}</li>',
        '<li><b class="wrong">✕</b>totally irrelevant</li>',
        f"<li>more relevant than this share of all {all_}:</li>",
        *(f'<li class="b{band}"><i></i>{step}</li>' for band, step in enumerate(steps, 1)),
    ]
    return f'<ul class="key" aria-label="key">{"".join(keys)}</ul>'


def _query(query: Query, comparison: RankedLists, thumbnails: Thumbnails) -> str:
    data, image = comparison.data, query.image(comparison.data)
    caption = data.captions[query.index if query.way == "t2i" else data.captions_of[image][0]]
    query_text = f"<q>{escape(caption)}</q>" if query.way == "t2i" else f"an image, described as <q>{escape(caption)}</q>"
    lists = "\n".join(
        f"<div>{_heading(top_list, query.way)}"
        f"{_images(top_list, comparison, thumbnails) if query.way == 't2i' else _captions(top_list, comparison)}</div>"
        for top_list in query.lists
    )
    note = f'<span class="note">totally irrelevant: a degree up to {query.bound:.2f}</span>'
    head = f'<div class="asked">{_picture(image, comparison, thumbnails)}<h3>{query_text} {note}</h3></div>'
    return f'<article class="{query.way}">{head}\n<div class="lists">{lists}</div></article>'


def _heading(top_list: TopList, way: Direction) -> str:
    own = "own image" if way == "t2i" else "first own caption"
    summary = f"{top_list.num_irrelevant} of {len(top_list.items)} totally irrelevant, {own} at rank {top_list.own_rank:,}"
    return f'<h4>{escape(top_list.run)} <span class="note">{summary}</span></h4>'


def _images(top_list: TopList, comparison: RankedLists, thumbnails: Thumbnails) -> str:
    items = (
        f'<li class="{_kind(item)}">{_picture(item.index, comparison, thumbnails)}{_mark(item)}<i></i><small>{item.degree:.2f}</small></li>'
        for item in top_list.items
    )
    return f'<ol class="images">{"".join(items)}</ol>'


def _captions(top_list: TopList, comparison: RankedLists) -> str:
    def lines(items: Iterable[Item], start: int) -> str:
        entries = (
            f'<li class="{_kind(item)}">{_mark(item)}{escape(comparison.data.captions[item.index])} <small>{item.degree:.2f}</small></li>'
            for item in items
        )
        return f'<ol class="captions" start="{start}">{"".join(entries)}</ol>'

    rest = top_list.items[UNFOLDED:]
    folded = f"<details><summary>{len(rest)} more</summary>{lines(rest, UNFOLDED + 1)}</details>" if rest else ""
    return lines(top_list.items[:UNFOLDED], 1) + folded


def _picture(image: int, comparison: RankedLists, thumbnails: Thumbnails) -> str:
    """An image, or the words of its first caption where its pixels are not there."""
    words = escape(comparison.data.captions[comparison.data.captions_of[image][0]])
    content = thumbnails.jpeg(image)
    if content is None:
        return f'<span class="words">{words}</span>'
    return f'<img src="{page.data_uri(content, "jpeg")}" alt="{words}" title="{words}" width="{SIDE}" height="{SIDE}">'


def _kind(item: Item) -> str:
    return f"b{item.band}{' own' if item.own else ''}"


def _mark(item: Item) -> str:
    """A sign and a hidden word, so that nothing is shown by color alone."""
    marks = [(item.own, "✓", "own"), (item.irrelevant, "✕", "totally irrelevant")]
    return "".join(
        f'<b class="{"right" if sign == "✓" else "wrong"}">{sign}<span class="hidden"> {word} </span></b>'
        for true, sign, word in marks
        if true
    )


def _alt(comparison: RankedLists) -> str:
    charts = [
        f"{DIRECTIONS[way]}: "
        + ", ".join(f"{ranker.name} {result.whole.mean:.2f}" for ranker, result in zip(comparison.rankers, measured, strict=True))
        for way in SHOWN
        for measured in [comparison.measured[way]]
    ]
    return f"Two charts of CS@K against K. Over the whole list, {'; '.join(charts)}."


_CURVES = "CS@K over all queries: 1 where the more relevant always scores higher, 0 for a random order. Shaded: 95 % intervals."


def _glossary(comparison: RankedLists) -> list[tuple[str, str]]:
    meaning = {
        "own": "the degree between a caption and the image's first caption",
        "best": "the highest degree between a caption and any of the image's captions",
        "mean": "the mean degree between a caption and the image's captions",
    }
    degree = (
        f"How well a caption fits an image, from 0 to 1, by {comparison.degrees!r}: {meaning[comparison.image]}, or the truth where it is known. "
        "An estimate, not a judgement of people."
    )
    irrelevant = (
        "The Ladder paper (Zhou et al., 2020) marks such items in its figure 2 and does not say by which rule. Here all candidates of the "
        "same query say it, since degrees differ in scale from estimator to estimator and from query to query: the less relevant "
        f"{_percent(comparison.scale.irrelevant)} of them, and what is as relevant as these. A random list has as large a share of them."
    )
    score = (
        "The coherent score: Kendall's tau-b between scores and degrees of the first K items; 1 where the more relevant always scores "
        "higher, 0 for a random order. As in the code released with the Ladder paper, and as visavis evaluate counts it: the first caption of each "
        "image alone, and the query's own item among the candidates."
    )
    return [
        ("degree", degree),
        ("totally irrelevant", irrelevant),
        ("colors and bars", "Where a degree lies among those of all candidates of the query; the number is the degree itself."),
        ("CS@K", score),
        ("random", "A random order of the same items, measured alike."),
    ]


def _made_by(comparison: RankedLists) -> str:
    return (
        f"Made by visavis {versions()['visavis']}. Beside this page: coherence.json with all numbers and lists, scores.png"
        f"{', lists.png' if any(query.way == 't2i' for query in comparison.queries) else ''}."
    )


def _number(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
