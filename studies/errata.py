"""Errata of the papers and of the code released with them, each with a computation that shows it.

    python studies/errata.py              print all
    python studies/errata.py NAME ...     print these
    python studies/errata.py --check      print only errors, including a stale docs/papers/errata.md
    python studies/errata.py --write      write docs/papers/errata.md

The exit status is 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from textwrap import indent

import torch
from findings import cocos, cocos_text, goal, goal_text, ladder, released, unified
from findings.base import KINDS, Erratum, Shown, errata_of

PROJECT = Path(__file__).resolve().parents[1]
PAGE = PROJECT / "docs" / "papers" / "errata.md"
MODULES = (unified, ladder, goal, goal_text, cocos, cocos_text, released)
CATALOG = {erratum.name: erratum for module in MODULES for erratum in errata_of(module)}

HEAD = """# Errata

This page lists misprints in the papers behind visavis, and differences between a paper and its released code. All authors make such slips, and
the findings do not diminish the ideas. They are listed so that nobody has to find them again.

Each entry has five parts:

- **Where** it is.
- **Found:** the printed or released form.
- **Correct:** the correct form.
- **Effect:** how much it matters.
- **visavis:** what visavis does.

Every entry ends with a command that shows the finding: a few lines of the plain formulas in float64, checked by autograd, on batches with fixed
seeds. An error below 1e-10 is printed as 0.

`python studies/errata.py` runs all of them in seconds. `python studies/errata.py --write` writes this page. A test fails if a claim no longer
holds or the page is stale. Corrections are welcome.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="An entry, for example unified.eq_15_denominator."
    )
    parser.add_argument("--check", action="store_true", help="Print only errors.")
    parser.add_argument("--write", action="store_true", help="Write docs/papers/errata.md.")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(CATALOG))
    if unknown:
        parser.error(f"NAME: unknown entry {', '.join(unknown)}. Choose from {', '.join(CATALOG)}.")
    torch.set_num_threads(1)
    chosen = list(CATALOG) if options.write else options.names or list(CATALOG)
    if not (options.check or options.write):
        print("\n".join(map(as_text, chosen)))
    false = [name for name in chosen if (shown := result(name)) and not shown.holds]
    if false:
        print(f"No longer true: {', '.join(false)}.", file=sys.stderr)
        return 1
    if options.write:
        PAGE.write_text(page(), encoding="utf-8")
    if (
        options.check
        and not options.names
        and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page())
    ):
        print(
            "docs/papers/errata.md: stale. Run python studies/errata.py --write.", file=sys.stderr
        )
        return 1
    return 0


@cache
def result(name: str) -> Shown | None:
    """The result of an entry's computation. None if it has none."""
    show = CATALOG[name].show
    return show() if show else None


def as_text(name: str) -> str:
    """The text of one entry for the terminal."""
    shown = result(name)
    lines = shown.lines if shown else "(nothing to compute)"
    return f"{name}: {CATALOG[name].title}\n" + indent(lines, "    ")


def page() -> str:
    """docs/papers/errata.md."""
    kinds = "\n".join(
        f"| {kind} | {meaning} | {sum(e.kind == kind for e in CATALOG.values())} |"
        for kind, meaning in KINDS.items()
    )
    parts = [HEAD.strip(), f"| kind | meaning | entries |\n|---|---|---|\n{kinds}"]
    for module in MODULES:
        heading, about = (module.__doc__ or "").strip().split("\n", 1)
        parts += [f"## {heading}", " ".join(about.split()), *map(section, errata_of(module))]
    return "\n\n".join(parts) + "\n"


def section(erratum: Erratum) -> str:
    """One entry of the page."""
    fields = "\n".join(f"- **{key}.** {text}" for key, text in erratum.fields.items())
    text = f"### {erratum.title}\n\n*{erratum.kind}*\n\n{fields}".replace("``", "`")
    text = re.sub(r"\$[^$]+\$", r"`\g<0>`", text)
    shown = result(erratum.name)
    return (
        f"{text}\n\n```\n$ python studies/errata.py {erratum.name}\n{shown.lines}\n```"
        if shown
        else text
    )


if __name__ == "__main__":
    sys.exit(main())
