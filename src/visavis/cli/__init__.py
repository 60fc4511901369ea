"""The command line: parse arguments, call the verb of the same name, print. The only part that prints."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from visavis.cli import comparison, data, graded, objectives, retrieval, runs, serving
from visavis.cli.signals import Ended, ends_heard
from visavis.cli.terminal import show_what_can_be_shown, tell
from visavis.errors import VisavisError

app = typer.Typer(
    name="visavis",
    help="Train, evaluate, diagnose and use vision-language retrieval.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Look at data.", no_args_is_help=True, rich_markup_mode=None)
data_app.command("check")(data.data_check)
data_app.command("audit")(data.data_audit)
data_app.command("convert")(data.data_convert)
data_app.command("scenes")(data.data_scenes)
relevance_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
relevance_app.callback()(graded.relevance)
relevance_app.command("thresholds")(graded.relevance_thresholds)
relevance_app.command("fit")(graded.relevance_fit)

for command in (
    data.demo,
    data.doctor,
    data.features,
    data.convert,
    runs.train,
    runs.evaluate,
    runs.diagnose,
    runs.probe,
    runs.explain,
    objectives.anatomy,
    comparison.compare,
    comparison.reproduce,
    graded.coherence,
    graded.agreement,
    retrieval.index,
    retrieval.search,
    retrieval.label,
    retrieval.judged,
    serving.serve,
    data.catalog,
):
    app.command()(command)
app.add_typer(data_app, name="data")
app.add_typer(relevance_app, name="relevance")

LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""By this torch asks Linux for pages of 2 MiB for large tensors, which attention then gets back faster after each block; the user's own word counts."""


def main() -> None:
    """Run the command line; a user's error becomes one sentence on stderr and exit code 1, a signal one sentence and the shell's code."""
    os.environ.setdefault(LARGE_PAGES, "1")
    show_what_can_be_shown()
    try:
        with ends_heard():
            app()
    except VisavisError as error:
        _end(str(error), 1)
    except MemoryError as error:
        _end(f"the memory is not enough{f': {error}' if str(error) else ''}; take less at once, or close other programs.", 1)
    except Ended as ended:
        _end(f"ended by {ended.by.name}.", 128 + ended.by)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        _end(f"{error.filename or 'a file'} cannot be read or written: {error.strerror}.", 1)


def _end(sentence: str, code: int) -> NoReturn:
    tell(f"visavis: {sentence}")
    sys.exit(code)
