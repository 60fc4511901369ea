"""Page and CSV file of a board."""

from __future__ import annotations

from pathlib import Path

from visavis.core import storage
from visavis.core.table_formats import format_csv
from visavis.papers.board.board import Board
from visavis.research.reports.html_report import render_report

CSV_FILE = "board.csv"
PAGE_FILE = "report.html"


def write_board(board: Board, folder: Path) -> None:
    """Write ``report.html`` and ``board.csv`` into a folder."""
    storage.write_text(folder / CSV_FILE, format_csv(board.csv_table()))
    page = render_report("board", package="visavis.papers", board=board, facts=_facts(board))
    storage.write_text(folder / PAGE_FILE, page)


def _facts(board: Board) -> list[tuple[str, str]]:
    rows = [row for group in board.groups for row in group.rows]
    seeds = sorted({len(row.runs) for row in rows})
    tables = len(board.groups)
    return [
        (f"{board.num_runs:,}", "run" if board.num_runs == 1 else "runs"),
        (
            f"{len({row.objective for row in rows})} × {len({row.model for row in rows})}",
            "objectives × models",
        ),
        (
            str(tables),
            "table of runs that can be compared"
            if tables == 1
            else "tables, each of runs that can be compared",
        ),
        (" to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))), "seeds of a row"),
    ]
