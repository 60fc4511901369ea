"""Tables of results in notebooks, as HTML and as pandas frames."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from visavis.core.errors import MissingExtra

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image

MAX_HTML_ROWS = 60
THUMBNAIL_SIZE = (160, 120)


class NotebookTable:
    """Base class of results that are shown as a table. The rows come from ``to_json``.

    Attributes:
        ROWS: Dotted key of the list of rows in ``to_json()``. Empty: the object is one row.
    """

    ROWS: ClassVar[str] = ""

    def to_json(self) -> Mapping[str, Any]:
        """Convert to plain values.

        Returns:
            A JSON object.
        """
        raise NotImplementedError

    def table_rows(self) -> list[dict[str, Any]]:
        """Return the rows of the table.

        Returns:
            Values by column. Nested objects have dotted columns. Lists of objects are left out.
        """
        content: Any = self.to_json()
        for key in filter(None, self.ROWS.split(".")):
            content = content[key]
        return [flat_row(row) for row in (content if self.ROWS else [content])]

    def html_rows(self) -> list[dict[str, Any]]:
        """Return the rows that a notebook shows. Default: ``table_rows``."""
        return self.table_rows()

    def table_notes(self) -> Sequence[str]:
        """Return sentences that are shown below the table."""
        return ()

    def table_images(self) -> Sequence[Image | None]:
        """Return an image for each row, or nothing."""
        return ()

    def to_pandas(self) -> pd.DataFrame:
        """Convert to a pandas frame.

        Returns:
            One row for each part of the result, such as a setting, a protocol or a hit.

        Raises:
            MissingExtra: If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtra("pandas", "notebook", "to_pandas()") from None
        return pd.DataFrame(self.table_rows())

    def _repr_html_(self) -> str:
        rows = self.html_rows()
        images = self.table_images()
        columns = list(dict.fromkeys(column for row in rows for column in row))
        if len(rows) == 1 and not images:
            head = ["", ""]
            lines = [[column, rows[0][column]] for column in columns]
        else:
            head = columns
            lines = [[row.get(column) for column in columns] for row in rows]
        body = [[_html_cell(value) for value in line] for line in lines[:MAX_HTML_ROWS]]
        if images:
            head = ["", *head]
            body = [
                [f"<td>{_html_image(image)}</td>", *line]
                for image, line in zip(images, body, strict=False)
            ]
        notes = [*self.table_notes()] or ([] if rows else ["No entries."])
        if len(lines) > MAX_HTML_ROWS:
            notes.append(f"{len(lines) - MAX_HTML_ROWS:,} more rows: to_pandas() has all.")
        title = f"<p><strong>{escape(type(self).__name__)}</strong></p>"
        header = (
            f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if any(head) else ""
        )
        table = "".join(f"<tr>{''.join(line)}</tr>" for line in body)
        return (
            title
            + (f"<table>{header}{table}</table>" if body else "")
            + "".join(f"<p>{escape(note)}</p>" for note in notes)
        )


def flat_row(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten an object to one row.

    Args:
        values: Plain values, with objects of any depth.

    Returns:
        Values by dotted key. Lists of plain values become one text, other lists are left out.

    Example:
        >>> flat_row({"name": "a", "mean": {"rsum": 297.3}, "seeds": [1, 2], "runs": [{"seed": 1}]})
        {'name': 'a', 'mean.rsum': 297.3, 'seeds': '1, 2'}
    """
    row = dict[str, Any]()
    for key, value in values.items():
        if isinstance(value, Mapping):
            row |= {f"{key}.{name}": inner for name, inner in flat_row(value).items()}
        elif not isinstance(value, list | tuple):
            row[str(key)] = value
        elif not any(isinstance(part, Mapping | list | tuple) for part in value):
            row[str(key)] = ", ".join(map(str, value))
    return row


def _html_cell(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    text = (
        ""
        if value is None
        else f"{value:,.5g}"
        if isinstance(value, float)
        else f"{value:,}"
        if is_number
        else str(value)
    )
    return f'<td style="text-align: {"right" if is_number else "left"}">{escape(text)}</td>'


def _html_image(image: Image | None) -> str:
    if image is None:
        return ""
    small = image.convert("RGB")
    file = io.BytesIO()
    small.thumbnail(THUMBNAIL_SIZE)
    small.save(file, "JPEG")
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}">'
