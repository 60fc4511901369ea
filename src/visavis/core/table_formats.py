"""Formats of tables: text, Markdown, CSV and LaTeX. HTML is in ``table_html``."""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections.abc import Iterator
from itertools import groupby, pairwise

from visavis.core.table import SIMILAR_MARK, Cell, Column, Table, as_cells

_LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    "γ": r"$\gamma$",
    "τ": r"$\tau$",
    "†": r"$\dagger$",
}


def text_lines(table: Table) -> Iterator[tuple[str, bool]]:
    """Draw the columns and rows of a table for a terminal: each line, and whether it is a heading."""
    columns = table.columns
    if not columns:
        return
    # Titles of several lines: names start on the first line, numbers end on the last one.
    titles = [column.title.split("\n") for column in columns]
    height = max(map(len, titles))
    filled = []
    for column, title in zip(columns, titles, strict=True):
        blank = [""] * (height - len(title))
        filled.append([*title, *blank] if column.is_text else [*blank, *title])
    # Texts of each line, and whether it is a heading.
    lines = [([*line], True) for line in zip(*filled, strict=True)]
    for row in (*table.rows, *table.last_rows):
        lines += _text_rows(columns, as_cells(row))
    whole = [texts for texts, _ in lines if len(texts) == len(columns)]
    widths = [max(map(_width, column)) for column in zip(*whole, strict=True)]
    gaps = ["", *["  "] * (len(columns) - 1)]
    if any(column.group for column in columns):
        # Less space within a group, more between groups.
        pairs = pairwise(columns)
        gaps = ["", *(" " if left.group == right.group else "   " for left, right in pairs)]
        yield _group_line(columns, widths, gaps), True
    for texts, is_heading in lines:
        padded = [
            gap + _pad(text, width, is_text=column.is_text)
            for gap, text, width, column in zip(gaps, texts, widths, columns, strict=False)
        ]
        line = "".join(padded if len(texts) > 1 else texts).rstrip()
        if line or not is_heading:
            yield line, is_heading


def format_text(table: Table) -> str:
    """Draw the columns and rows of a table for a terminal."""
    return "\n".join(line for line, _ in text_lines(table))


def _text_rows(columns: tuple[Column, ...], cells: list[Cell]) -> list[tuple[list[str], bool]]:
    """The lines of a row: a heading, or values, below which spreads may have a line of their own."""
    if len(cells) == 1 < len(columns):
        return [([columns[0].value_text(cells[0])], True)]
    marks = [SIMILAR_MARK if cell.mark == "similar" else "" for cell in cells]
    pairs = [*zip(columns, cells, strict=True)]
    if not cells[0].note:
        texts = [_whole_text(column, cell) for column, cell in pairs]
        return [([text + mark for text, mark in zip(texts, marks, strict=True)], False)]
    values = [column.value_text(cell) for column, cell in pairs]
    spreads = [column.small_spread(cell, short=True) for column, cell in pairs[1:]]
    return [
        ([value + mark for value, mark in zip(values, marks, strict=True)], False),
        ([f"  {cells[0].note}", *spreads], False),
    ]


def _whole_title(column: Column) -> str:
    """Title on one line, after the title of the group."""
    return f"{column.group} {column.title}".strip().replace("\n", " ")


def _whole_text(column: Column, cell: Cell) -> str:
    """Value and spread on one line."""
    return column.value_text(cell) + column.spread_text(cell)


def _group_line(columns: tuple[Column, ...], widths: list[int], gaps: list[str]) -> str:
    line = ""
    start = 0
    for title, group in groupby(columns, lambda column: column.group):
        end = start + len([*group])
        line += _pad(title, sum(widths[start:end]) + sum(map(len, gaps[start:end])), is_text=False)
        start = end
    return line.rstrip()


def _pad(text: str, width: int, *, is_text: bool) -> str:
    space = " " * (width - _width(text))
    return text + space if is_text else space + text


def _width(text: str) -> int:
    """Columns of a terminal that a text takes."""
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "FW")
        for char in text
    )


def format_markdown(table: Table) -> str:
    """Format a table with its notes. The best values are bold."""
    lines = [
        [_whole_title(column) for column in table.columns],
        ["---" if column.is_text else "---:" for column in table.columns],
    ]
    marks = {"": "{}", "best": "**{}**", "similar": "{}" + SIMILAR_MARK}
    for row in (*table.rows, *table.last_rows):
        cells = as_cells(row)
        if len(cells) == 1 < len(table.columns):
            heading = table.columns[0].value_text(cells[0])
            lines.append([f"**{heading}**", *[""] * (len(table.columns) - 1)])
            continue
        lines.append(
            [
                marks[cell.mark].format(_whole_text(column, cell))
                for column, cell in zip(table.columns, cells, strict=True)
            ]
        )
    rows = (" | ".join(text.replace("|", r"\|") for text in line) for line in lines)
    return "".join(f"| {row} |\n" for row in rows) + "".join(f"\n{note}\n" for note in table.notes)


def format_csv(table: Table) -> str:
    """Format the values of a table, without its notes. None is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key or _whole_title(column) for column in table.columns])
    for row in (*table.rows, *table.last_rows):
        values = [cell.value for cell in as_cells(row)]
        writer.writerow(values + [""] * (len(table.columns) - len(values)))
    return text.getvalue()


def format_latex(table: Table, label: str) -> str:
    r"""Format a table with its notes as the caption. The best values are bold. It needs
    ``\usepackage{booktabs}``.
    """
    columns = table.columns
    heads = []
    rules = []
    start = 1
    for title, group in groupby(columns, lambda column: column.group):
        length = len([*group])
        heads.append(
            rf"\multicolumn{{{length}}}{{c}}{{{escape_latex(title)}}}"
            if title
            else " & " * (length - 1)
        )
        if title:
            rules.append(rf"\cmidrule(lr){{{start}-{start + length - 1}}}")
        start += length
    names = " & ".join(escape_latex(column.title.replace("\n", " ")) for column in columns)
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escape_latex(' '.join(table.notes))}}}",
        rf"  \label{{tab:{label}}}",
        rf"  \begin{{tabular}}{{{''.join('l' if column.is_text else 'r' for column in columns)}}}",
        r"    \toprule",
        *([rf"    {' & '.join(heads).lstrip()} \\", f"    {' '.join(rules)}"] if rules else []),
        rf"    {names.lstrip()} \\",
        r"    \midrule",
        *(rf"    {_latex_row(columns, as_cells(row))} \\" for row in table.rows),
        *([r"    \midrule"] if table.last_rows else []),
        *(
            rf"    {_latex_row(columns, as_cells(row), is_result=False)} \\"
            for row in table.last_rows
        ),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(columns: tuple[Column, ...], cells: list[Cell], *, is_result: bool = True) -> str:
    if len(cells) == 1 < len(columns):
        text = escape_latex(columns[0].value_text(cells[0]))
        return rf"\multicolumn{{{len(columns)}}}{{l}}{{\textbf{{{text}}}}}"
    return " & ".join(
        _latex_number(column, cell)
        if is_result and isinstance(cell.value, int | float) and not math.isnan(cell.value)
        else escape_latex(_whole_text(column, cell))
        for column, cell in zip(columns, cells, strict=True)
    )


def _latex_number(column: Column, cell: Cell) -> str:
    value = escape_latex(column.value_text(cell))
    if cell.mark == "best":
        value = rf"\mathbf{{{value}}}"
    elif cell.mark == "similar":
        value += r"^{\dagger}"
    spread = escape_latex(column.small_spread(cell)).replace("–", "--")
    return f"${value}$" + (rf" {{\scriptsize {spread}}}" if spread else "")


def escape_latex(text: str) -> str:
    r"""Escape text for LaTeX.

    Args:
        text: Text.

    Returns:
        LaTeX.

    Example:
        >>> print(escape_latex('Goal(pair="sig_ms") & 50 %'))
        Goal(pair="sig\_ms") \& 50 \%
    """
    special = re.compile(f"[{re.escape(''.join(_LATEX_SPECIAL))}]|([#$%&_{{}}])")
    text = special.sub(
        lambda match: f"\\{match[0]}" if match[1] else _LATEX_SPECIAL[match[0]], text
    )
    return re.sub(r"\bt-test", "$t$-test", text)
