"""Tables as HTML, in reports and notebooks."""

from __future__ import annotations

from html import escape
from itertools import groupby

from visavis.core.table import SIMILAR_MARK, Cell, Column, Table, as_cells

_LEFT = ' style="text-align: left"'


def format_html(table: Table) -> str:
    """Format a table. Its notes are the caption, the first column names the rows."""
    caption = f"<caption>{escape(' '.join(table.notes))}</caption>" if table.notes else ""
    images = [
        f'<td><img alt="" src="{escape(uri)}"></td>' if uri else "<td></td>" for uri in table.images
    ] or [""] * len(table.rows)
    rows = [_row(table.columns, as_cells(row)) for row in (*table.rows, *table.last_rows)]
    number = len(table.rows)
    body = [f"<tr>{image}{row}</tr>" for image, row in zip(images, rows[:number], strict=True)]
    last = "".join(f"<tr>{row}</tr>" for row in rows[number:])
    return (
        f"<table>{caption}{_head(table.columns, '<td></td>' if table.images else '')}"
        f"<tbody>{''.join(body)}</tbody>{f'<tfoot>{last}</tfoot>' if last else ''}</table>"
    )


def _head(columns: tuple[Column, ...], upper: str) -> str:
    """One row of titles, or two if columns have common titles."""
    if not any(column.title or column.group for column in columns):
        return ""
    has_groups = any(column.group for column in columns)
    span = ' rowspan="2"' if has_groups else ""
    lower = ""
    for group, members in groupby(columns, lambda column: column.group):
        # A title below the title of its group takes one row.
        start = "<th" if group else f"<th{span}"
        aligned = [(_LEFT if column.is_text else "", escape(column.title)) for column in members]
        titles = [f'{start} scope="col"{align}>{title}</th>' for align, title in aligned]
        if group:
            upper += f'<th colspan="{len(titles)}" scope="colgroup">{escape(group)}</th>'
            lower += "".join(titles)
        else:
            upper += "".join(titles)
    return f"<thead><tr>{upper}</tr>{f'<tr>{lower}</tr>' if has_groups else ''}</thead>"


def _row(columns: tuple[Column, ...], cells: list[Cell]) -> str:
    if len(cells) == 1 < len(columns):
        text = escape(columns[0].value_text(cells[0]))
        return f'<th colspan="{len(columns)}" scope="rowgroup"{_LEFT}>{text}</th>'
    pairs = enumerate(zip(columns, cells, strict=True))
    return "".join(_cell(column, cell, is_name=number == 0) for number, (column, cell) in pairs)


def _cell(column: Column, cell: Cell, *, is_name: bool) -> str:
    marks = {"": "{}", "best": "<strong>{}</strong>", "similar": f"{{}}<sup>{SIMILAR_MARK}</sup>"}
    text = marks[cell.mark].format(escape(column.value_text(cell)))
    if small := cell.note or column.small_spread(cell):
        text += f"<small>{escape(small)}</small>"
    align = _LEFT if column.is_text else ""
    return f'<th scope="row"{align}>{text}</th>' if is_name else f"<td{align}>{text}</td>"
