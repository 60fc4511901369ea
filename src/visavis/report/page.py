"""A report as one HTML file: pictures inside, nothing fetched, light and dark, readable on a phone.

Everything that comes from outside a template goes through ``escape``; sections are made of the small pieces below.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from visavis.comparison.table import METRICS, Columns, Row, Table


@dataclass(frozen=True)
class Section:
    """A part of the page: its heading, and its body as HTML."""

    heading: str
    body: str


@dataclass(frozen=True)
class Shades:
    """One picture as PNG bytes, for light and for dark pages."""

    light: bytes
    dark: bytes


def page(title: str, lead: str, sections: Sequence[Section], footer: str, style: str = "") -> str:
    """The whole page. title, lead, footer: plain text. style: CSS of its own, after that of all pages."""
    parts = "\n".join(f"<section>\n<h2>{escape(part.heading)}</h2>\n{part.body}\n</section>" for part in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
</header>
<main>
{parts}
</main>
<footer><p>{escape(footer)}</p></footer>
</body>
</html>
"""


def escape(text: str) -> str:
    """Plain text as HTML, quotes included."""
    return html.escape(str(text), quote=True)


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{escape(text)}</p>"


def numbers(facts: Iterable[tuple[str, str]]) -> str:
    """A few numbers in large type, with their meaning: (number, meaning)."""
    items = "".join(f"<div><dd>{escape(number)}</dd><dt>{escape(meaning)}</dt></div>" for number, meaning in facts)
    return f'<dl class="figures">{items}</dl>'


def glossary(entries: Iterable[tuple[str, str]]) -> str:
    """Terms and what they mean."""
    return "<dl>" + "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in entries) + "</dl>"


def commands(entries: Iterable[tuple[str, str]]) -> str:
    """Command lines, each with what it does: (what, command)."""
    items = (f'<li>{escape(what)}<pre tabindex="0"><code>{escape(command)}</code></pre></li>' for what, command in entries)
    return f'<ol class="commands">{"".join(items)}</ol>'


def picture(shades: Shades, alt: str, caption: str) -> str:
    """A PNG as a figure that scrolls where the screen is narrow."""
    dark = f'<source srcset="{data_uri(shades.dark)}" media="(prefers-color-scheme: dark)">'
    image = f'<picture>{dark}<img src="{data_uri(shades.light)}" alt="{escape(alt)}"></picture>'
    return f'<figure><div class="wide" tabindex="0">{image}</div><figcaption>{escape(caption)}</figcaption></figure>'


def strip(query: str, note: str, images: Iterable[tuple[bytes, str, float, bool]]) -> str:
    """A query and its retrieved images: (JPEG, its content in words, score, right or not)."""
    items = []
    for image, alt, score, right in images:
        mark = '<b title="fits">✓<span class="hidden"> fits</span></b>' if right else '<span class="hidden">does not fit</span>'
        seen = f'<img src="{data_uri(image, "jpeg")}" alt="{escape(alt)}" title="{escape(alt)}" width="192" height="192">'
        items.append(f"<li{_class('right' if right else '')}>{seen}<small>{mark} {score:.2f}</small></li>")
    return f'<h3><q>{escape(query)}</q> <span class="note">{escape(note)}</span></h3>\n<ol class="strip">{"".join(items)}</ol>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], note: str) -> str:
    """A table whose first column names the row."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(text)}</td>" for text in cells)}</tr>' for first, *cells in rows
    )
    label = escape(heads[0])
    return f"""<div class="wide" tabindex="0" role="group" aria-label="{label}">
<table class="told">
<caption>{escape(note)}</caption>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>"""


def comparison(table: Table, about: Mapping[str, str], columns: Sequence[Columns] = ()) -> str:
    """A table of results, the best mean of each column marked. about: a sentence for each row's name. columns: some of the table's, instead of all."""
    columns = columns or table.columns
    metrics = [metric for group in columns for metric in group.labels]
    rows = "".join(_row(row, table, about.get(row.name, ""), metrics) for row in table.rows)
    chance = "".join(f"<td>{table.chance(metric):.1f}</td>" for metric in metrics)
    return f"""<div class="wide" tabindex="0" role="group" aria-label="comparison">
<table{_class("few" if len(metrics) < len(METRICS) else "")}>
<caption>{escape(table.caption())}</caption>
<thead>
<tr><th rowspan="2" scope="col">objective</th>{"".join(map(_head, columns))}</tr>
<tr>{"".join(f'<th scope="col">{label}</th>' for group in columns if group.head for label in group.labels.values())}</tr>
</thead>
<tbody>
{rows}<tr class="chance"><th scope="row">chance</th>{chance}</tr>
</tbody>
</table>
</div>"""


def _head(group: Columns) -> str:
    """What stands above a group's labels, or above both lines of heads those of one without a head."""
    if group.head:
        return f'<th colspan="{len(group.labels)}" scope="colgroup">{escape(group.head)}</th>'
    return "".join(f'<th rowspan="2" scope="col">{label}</th>' for label in group.labels.values())


def _row(row: Row, table: Table, about: str, metrics: Iterable[str]) -> str:
    def cell(metric: str) -> str:
        deviation = row.deviation(metric)
        spread = "" if deviation is None else f"<small>±{deviation:.1f}</small>"
        value = f"{row.mean(metric):.1f}"
        return f"<td>{f'<strong>{value}</strong>' if table.leads(row, metric) else value}{spread}</td>"

    named = f'<th scope="row">{escape(row.name)}<small>{escape(about)}</small></th>'
    return f"<tr>{named}{''.join(map(cell, metrics))}</tr>\n"


def data_uri(content: bytes, kind: str = "png") -> str:
    """An image as a data URI, embedded in the page."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


STYLE = """
:root { --paper: #ffffff; --ink: #1d2330; --soft: #5b6475; --line: #dfe3ea; --card: #f5f7fa; --accent: #2b6cd1; --right: #158a4e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #171b24; --ink: #e4e8f0; --soft: #a3adbf; --line: #333b4a; --card: #202633; --accent: #77aaff; --right: #3fc380; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem 3rem; background: var(--paper); color: var(--ink);
  font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: clamp(1.7rem, 5vw, 2.4rem); line-height: 1.15; margin: 0 0 .75rem; letter-spacing: -.02em; }
h2 { font-size: 1.35rem; line-height: 1.25; margin: 3rem 0 .75rem; letter-spacing: -.01em; }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .6rem; }
p, dd { max-width: 46rem; }
.lead { font-size: 1.15rem; color: var(--soft); margin: 0; }
.note, figcaption, caption, footer { color: var(--soft); font-size: .875rem; font-weight: 400; }
.figures { display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem; margin: 1.5rem 0; }
.figures div { display: flex; flex-direction: column; background: var(--card); border-radius: .75rem; padding: .9rem 1.1rem; }
.figures dd { order: -1; margin: 0; font-size: 1.75rem; line-height: 1.2; font-weight: 650; letter-spacing: -.02em; }
.figures dt { font-size: .875rem; line-height: 1.35; font-weight: 400; color: var(--soft); margin: .2rem 0 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; min-width: 42rem; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; padding-top: .6rem; max-width: min(100%, calc(100vw - 2.5rem)); }
th, td { padding: .5rem .55rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; vertical-align: baseline; }
thead th { font-size: .8rem; font-weight: 600; color: var(--soft); }
thead th[colspan] { text-align: center; }
thead tr:last-child th { text-align: right; }
thead tr:first-child th:first-child, tbody th { text-align: left; }
tbody th { white-space: normal; min-width: 8rem; overflow-wrap: break-word; }
tbody th small { display: block; font-weight: 400; color: var(--soft); line-height: 1.35; }
td small { color: var(--soft); margin-left: .2rem; }
td strong { color: var(--accent); }
.told td, .told th { white-space: normal; }
.told { min-width: 36rem; }
.few { min-width: 0; }
.chance th, .chance td { color: var(--soft); font-weight: 400; }
figure { margin: 1.25rem 0; }
figure img { display: block; width: 100%; min-width: 38rem; height: auto; border-radius: .5rem; }
figcaption { margin-top: .5rem; max-width: 46rem; }
.strip { display: grid; grid-template-columns: repeat(5, 1fr); gap: .6rem; list-style: none; margin: 0; padding: 0; }
.strip img { display: block; width: 100%; height: auto; aspect-ratio: 1; border-radius: .6rem; }
.strip small { display: block; padding-top: .2rem; text-align: center; color: var(--soft); font-variant-numeric: tabular-nums; }
.strip .right img { outline: 3px solid var(--right); outline-offset: -1px; }
.strip b { color: var(--right); }
q { font-style: italic; }
h3 .note { margin-left: .4rem; }
dl dt { font-weight: 600; margin-top: .8rem; }
dl dd { margin: 0; }
.commands { padding-left: 1.25rem; }
.commands li { margin: .9rem 0; }
pre { overflow-x: auto; margin: .35rem 0 0; padding: .7rem .9rem; border-radius: .5rem; background: var(--card); }
code { font: .9rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .5rem; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
@media (max-width: 34rem) {
  body { padding: 1.5rem 1rem 2rem; font-size: 1rem; }
  .strip { grid-template-columns: repeat(3, 1fr); }
  .figures { grid-template-columns: repeat(2, 1fr); }
}
@media print { body { max-width: none; } .wide { overflow: visible; } }
"""
