"""Count the code of src: files, and lines without docstrings, comments and blank lines: python
tools/count_code.py.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "visavis"


def count_code_lines(text: str) -> int:
    """Lines that hold code."""
    statements = (
        statement
        for node in ast.walk(ast.parse(text))
        for body in [getattr(node, "body", None)]
        if isinstance(body, list)
        for statement in body
    )
    documentation = {
        line
        for statement in statements
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
    }
    lines = enumerate(text.split("\n"), 1)
    return sum(
        1
        for number, line in lines
        if line.strip() and not line.lstrip().startswith("#") and number not in documentation
    )


def main() -> None:
    files, lines = Counter[str](), Counter[str]()
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0]
        files[package] += 1
        lines[package] += count_code_lines(path.read_text(encoding="utf-8"))
    for package in sorted(lines):
        print(f"{package:20} {files[package]:4} files {lines[package]:7,} lines")
    print(f"{'all':20} {files.total():4} files {lines.total():7,} lines")


if __name__ == "__main__":
    main()
