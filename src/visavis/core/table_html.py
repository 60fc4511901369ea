"""Tables as HTML, in reports and notebooks."""

from __future__ import annotations

import base64
import io
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from visavis.core.table import Cell, Column, Table, as_cells

if TYPE_CHECKING:
    from PIL.Image import Image

NARROW_COLUMNS = 7
"""Number of columns up to which a table needs no minimum width."""
THUMBNAIL_SIZE = (160, 120)
_LEFT = ' style="text-align: left"'


def format_html(table: Table) -> str:
    """Format a table. Its notes are the caption, the first column names the rows.

    Args:
        table: Table.

    Returns:
        HTML.
    """
    columns = table.columns
    caption = f"<caption>{escape(' '.join(table.notes))}</caption>" if table.notes else ""
    images = [f"<td>{_image(image)}</td>" for image in table.images]
    body = [
        f"<tr>{image}{_row(columns, as_cells(row))}</tr>"
        for image, row in zip(images or [""] * len(table.rows), table.rows, strict=True)
    ]
    last = [f"<tr>{_row(columns, as_cells(row))}</tr>" for row in table.last_rows]
    return (
        ('<table class="few">' if len(columns) <= NARROW_COLUMNS else "<table>")
        + caption
        + _head(columns, has_images=bool(images))
        + f"<tbody>{''.join(body)}</tbody>"
        + (f"<tfoot>{''.join(last)}</tfoot>" if last else "")
        + "</table>"
    )


def _head(columns: tuple[Column, ...], *, has_images: bool) -> str:
    """One row of titles, or two if columns have common titles."""
    if not any(column.title or column.group for column in columns):
        return ""
    has_groups = any(column.group for column in columns)
    upper = "<td></td>" if has_images else ""
    lower = ""
    for group, members in groupby(columns, lambda column: column.group):
        titles = [
            (escape(column.title.replace("\n", " ")), _LEFT if column.is_text else "")
            for column in members
        ]
        if group:
            upper += f'<th colspan="{len(titles)}" scope="colgroup">{escape(group)}</th>'
            lower += "".join(f'<th scope="col"{align}>{title}</th>' for title, align in titles)
        else:
            span = ' rowspan="2"' if has_groups else ""
            upper += "".join(
                f'<th{span} scope="col"{align}>{title}</th>' for title, align in titles
            )
    return f"<thead><tr>{upper}</tr>{f'<tr>{lower}</tr>' if has_groups else ''}</thead>"


def _row(columns: tuple[Column, ...], cells: list[Cell]) -> str:
    if len(cells) == 1 < len(columns):
        text = escape(columns[0].value_text(cells[0]))
        return f'<th colspan="{len(columns)}" scope="rowgroup"{_LEFT}>{text}</th>'
    return "".join(
        _cell(column, cell, is_name=column is columns[0])
        for column, cell in zip(columns, cells, strict=True)
    )


def _cell(column: Column, cell: Cell, *, is_name: bool) -> str:
    text = escape(column.value_text(cell))
    if cell.mark == "best":
        text = f"<strong>{text}</strong>"
    elif cell.mark == "similar":
        text += "<sup>†</sup>"
    small = escape(cell.note or column.small_spread(cell))
    text += f"<small>{small}</small>" if small else ""
    align = _LEFT if column.is_text else ""
    return f'<th scope="row"{align}>{text}</th>' if is_name else f"<td{align}>{text}</td>"


def _image(image: Image | None) -> str:
    if image is None:
        return ""
    small = image.convert("RGB")
    file = io.BytesIO()
    small.thumbnail(THUMBNAIL_SIZE)
    small.save(file, "JPEG")
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}">'
