"""Command line: parses arguments, calls the API function of the same name and prints its result.
Only this package prints.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from visavis.cli.terminal import (
    SignalReceived,
    escape_unencodable_output,
    print_error,
    signals_raised,
)
from visavis.core.child_processes import exclude_current_folder
from visavis.core.errors import ReportedByOtherProcess, VisavisError, requires_extra

if TYPE_CHECKING:
    import typer

    app: typer.Typer

HUGE_PAGES_VARIABLE = "THP_MEM_ALLOC_ENABLE"
"""Environment variable by which torch asks Linux for 2 MiB pages for large tensors, which speeds up
attention. A value of the user is kept.
"""

SPIN_VARIABLE = "GOMP_SPINCOUNT"
"""Environment variable of the OpenMP of torch: number of checks for work before a thread sleeps.
By default 300,000 times. On a shared machine, its team waits for a core meanwhile. Indexing 300
scenes took 19 s of processor time and 92 s by default, 6 s and 29 s with this number (load 28 on 2
cores). A value of the user is kept.
"""
ENCODING_COMMANDS = ("index", "search", "serve", "mcp", "classify", "features", "indexes")


@cache
def __getattr__(name: str) -> Any:
    """Build ``app``, all commands, when it is first used: ``main`` builds one command."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build_app()


def build_app(first_word: str = "") -> typer.Typer:
    """Import and build the commands. The import is not at the top, because Ctrl-C may come while
    the commands are imported.
    """
    with requires_extra("train", "the command line"):
        import typer  # noqa: F401 - the modules of the commands import it

    from visavis.cli import commands

    return commands.build_app(first_word)


def main() -> None:
    """Run the command line."""
    exclude_current_folder()
    os.environ.setdefault(HUGE_PAGES_VARIABLE, "1")
    # Before torch loads OpenMP.
    if "".join(sys.argv[1:2]) in ENCODING_COMMANDS and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_VARIABLE, "1000")
    # The XDG specification requires to ignore them. Other libraries, such as huggingface_hub, would
    # write into the current folder.
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        if name in os.environ and not os.path.isabs(os.environ[name]):
            del os.environ[name]
    escape_unencodable_output()
    try:
        with signals_raised():
            try:
                build_app("".join(sys.argv[1:2]))()
            except SystemExit as end:
                # Typer ends without a line if Ctrl-C comes while it reads the arguments. A command
                # ignores further interrupts, and then prints its line.
                is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                if end.code == 128 + signal.SIGINT and not is_ignored:
                    raise KeyboardInterrupt from None
                raise
    # An error of the user is one line on stderr, with exit code 1. A signal exits with the shell's
    # code.
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print_error("Stopped before the command started.")
        sys.exit(128 + signal.SIGINT)
    except ReportedByOtherProcess as error:
        sys.exit(error.exit_code)
    except VisavisError as error:
        from visavis.core.environment import shell_command
        from visavis.core.own_code import CodeNotNamed

        message = str(error)
        if isinstance(error, CodeNotNamed):
            words = shlex.join(["--code", error.source, *sys.argv[1:]])
            message += f" Repeat it with: {shell_command()} {words}"
        _exit(message, 1, lines=getattr(error, "__notes__", ()))
    except MemoryError as error:
        _exit(
            f"out of memory{f': {error}' if str(error) else ''}. Process less at once, or close "
            "other programs.",
            1,
        )
    except SignalReceived as received:
        sentences = [f"ended by {received.signal.name}.", *getattr(received, "__notes__", ())]
        _exit(" ".join(sentences), 128 + received.signal)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        _exit(f"{error.filename or 'a file'}: cannot be read or written: {error.strerror}.", 1)


def _exit(message: str, code: int, *, lines: Iterable[str] = ()) -> NoReturn:
    print_error(f"visavis: {message}")
    for line in lines:  # such as a command to copy
        print_error(line)
    sys.exit(code)
