"""Formats of tables: the same values as text, Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from visavis.cli.console import print_tables
from visavis.core.result import record_table
from visavis.core.table import Cell, Column, Table
from visavis.core.table_formats import format_csv, format_latex, format_markdown, format_text
from visavis.core.table_html import format_html

TABLE = Table(
    (
        Column("name", is_text=True),
        Column("R@1", ".1f", group="image to text", short_format=".0f"),
        Column("R@5", ".1f", group="image to text", missing="-"),
        Column("RSUM", ".1f", unit=" %", key="rsum"),
    ),
    (
        ("seeds",),
        (Cell("a_b", note="range"), Cell(1.26, (1.0, 2.0), "best"), None, Cell(3.0, (3.0, 3.0))),
        ("c|d", 1, math.nan, Cell(2.0, mark="similar")),
    ),
    ("A note.",),
    "title",
    last_rows=(("chance", 0.1, 0.25, 0.3),),
)


def test_text_aligns_numbers_and_puts_spreads_below():
    assert format_text(TABLE).splitlines() == [
        "       image to text",
        "name      R@1 R@5     RSUM",
        "seeds",
        "a_b       1.3   -    3.0 %",
        "  range   1–2          3.0",
        "c|d       1.0   -   2.0 %†",
        "chance    0.1 0.2    0.3 %",
    ]


def test_text_without_note_keeps_spreads_on_the_line():
    columns = (Column("edit", is_text=True), Column("change", "+.1f", spread=" ({} to {})"))
    table = Table(
        columns, (("blur", Cell(-1.0, (-2.0, -2.0))), ("nothing", Cell(math.nan, (1.0,))))
    )
    assert format_text(table).splitlines() == [
        "edit                  change",
        "blur     -1.0 (-2.0 to -2.0)",
        "nothing",
    ]


def test_text_of_titles_on_two_lines_ends_numbers_on_the_last():
    table = Table((Column("norm", is_text=True), Column("raw\nparts"), Column("x")), (("a", 1, 2),))
    assert format_text(table).splitlines() == ["norm    raw", "      parts  x", "a         1  2"]


def test_text_counts_wide_characters_as_two_columns():
    table = Table((Column("word", is_text=True), Column("n")), (("猫", 1), ("cafe\u0301", 2)))
    assert format_text(table).splitlines()[1:] == ["猫    1", "cafe\u0301  2"]


def test_markdown_has_group_titles_marks_and_notes():
    assert format_markdown(TABLE).splitlines() == [
        "| name | image to text R@1 | image to text R@5 | RSUM |",
        "| --- | ---: | ---: | ---: |",
        "| **seeds** |  |  |  |",
        "| a_b | **1.3 (1.0–2.0)** | - | 3.0 % (3.0) |",
        r"| c\|d | 1.0 | - | 2.0 %† |",
        "| chance | 0.1 | 0.2 | 0.3 % |",
        "",
        "A note.",
    ]


def test_csv_has_whole_values():
    rows = list(csv.reader(io.StringIO(format_csv(TABLE))))
    assert rows[0] == ["name", "image to text R@1", "image to text R@5", "rsum"]
    assert rows[2] == ["a_b", "1.26", "", "3.0"]
    assert {len(row) for row in rows} == {4}


def test_latex_has_group_rules_marks_and_caption():
    text = format_latex(TABLE, "results")
    assert r"    & \multicolumn{2}{c}{image to text} &  \\" in text
    assert r"\cmidrule(lr){2-3}" in text
    assert (
        r"a\_b & $\mathbf{1.3}$ {\scriptsize 1.0--2.0} & - & $3.0 \%$ {\scriptsize 3.0} \\" in text
    )
    assert r"c|d & $1.0$ & - & $2.0 \%^{\dagger}$ \\" in text
    assert r"\caption{A note.}" in text
    assert r"\label{tab:results}" in text


def test_html_has_group_titles_small_print_and_last_rows():
    html = format_html(TABLE)
    assert '<th colspan="2" scope="colgroup">image to text</th>' in html
    assert "a_b<small>range</small></th>" in html
    assert "<td><strong>1.3</strong><small>1.0–2.0</small></td><td>-</td>" in html
    assert "<td>2.0 %<sup>†</sup></td>" in html
    assert html.endswith("</td></tr></tfoot></table>")


@given(st.lists(st.tuples(st.text(max_size=8), st.floats() | st.none()), min_size=1, max_size=5))
def test_every_format_takes_any_values(rows):
    table = Table((Column("a", is_text=True), Column("b")), tuple(rows))
    assert format_markdown(table).startswith("| a | b |\n| --- | ---: |\n")
    assert format_html(table).count("<tr>") == 1 + len(rows)
    assert format_latex(table, "x").count(r" \\") >= 1 + len(rows)
    written = list(csv.reader(io.StringIO(format_csv(table), newline="")))
    assert [row[0] for row in written[1:]] == [name for name, _ in rows]
    assert format_text(table)


def test_row_of_another_length_is_an_error():
    table = Table((Column("a"), Column("b"), Column("c")), ((1, 2),))
    for write in (format_text, format_markdown, format_html):
        with pytest.raises(ValueError, match="zip"):
            write(table)


def test_print_tables_prints_shared_notes_once(capsys):
    first = Table((Column("x"),), ((1,),), ("own", "shared"), "one")
    print_tables([first, Table(notes=("shared", "last"))])
    assert capsys.readouterr().out.splitlines() == ["one", "x", "1", "own", "", "shared", "last"]


def test_print_tables_escapes_controls_and_markup(capsys):
    print_tables([Table((Column("[b]x[/b]", is_text=True),), (("[i]\x1b",),), title="[u]t")])
    assert capsys.readouterr().out.splitlines() == ["[u]t", "[b]x[/b]", r"[i]\x1b"]


def test_records_make_columns_of_all_keys():
    table = record_table([{"a": 1, "b": "x"}, {"a": 2.5, "c": True}])
    assert [(column.title, column.is_text) for column in table.columns] == [
        ("a", False),
        ("b", True),
        ("c", True),
    ]
    assert table.rows == ((1, "x", None), (2.5, None, True))
