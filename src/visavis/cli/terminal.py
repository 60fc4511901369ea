"""Output to a terminal: escaped control characters, JSON, closed pipes, and signals that end a
command.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escape_control_characters(text: str) -> str:
    r"""Escape control characters, which a file name may have. Tabs and newlines stay.

    Args:
        text: Text of any origin.

    Returns:
        Text that does not control a terminal.

    Example:
        >>> print(escape_control_characters("\x1b[2J.jpg"))
        \x1b[2J.jpg
    """
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def escape_unencodable_output() -> None:
    """Make stdout and stderr escape characters that they cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_error(text: str) -> None:
    """Print one line on stderr. Errors of a closed terminal are ignored.

    Args:
        text: Message. Newlines are escaped.
    """
    with contextlib.suppress(OSError):
        print(escape_control_characters(text).replace("\n", "\\n"), file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """Print a text on stdout.

    Args:
        text: Plain text.
    """
    try:
        print(escape_control_characters(text), flush=True)
    except OSError as error:
        # On Windows, a pipe without a reader is an invalid argument.
        if error.errno not in (errno.EPIPE, errno.EINVAL):
            raise
        exit_quietly()


def print_json(content: dict[str, Any]) -> None:
    """Print one line of JSON on stdout. Numbers that are not finite are printed as null.

    Args:
        content: JSON object.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    text = json.dumps(finite, ensure_ascii=not encoding.lower().startswith("utf"), allow_nan=False)
    print_line(re.sub(r"[\x7f-\x9f\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text))


def exit_quietly() -> NoReturn:
    """Exit without a message, as a command whose reader has left (``| head``)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + getattr(signal, "SIGPIPE", 13))


ENDING_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)
)
"""Signals that end a command: termination, and a closed terminal, which is SIGBREAK on Windows."""


class SignalReceived(BaseException):
    """A signal that ends the command. It is a BaseException so that no handler of errors catches
    it.

    Args:
        received: The signal.

    Attributes:
        signal: The signal.
    """

    def __init__(self, received: signal.Signals):
        super().__init__(received.name)
        self.signal = received


IMPORT_POLL_S = 0.05
"""Seconds between two checks whether an import has ended."""


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise SignalReceived on a signal in this block, and KeyboardInterrupt on Ctrl-C. Ignored
    signals stay ignored (``nohup``).

    The import of an extension is not interrupted, because C++ code ends the process with a message
    of its own if an exception reaches it there. Ctrl-C waits for its end, a second one does not.
    A KeyboardInterrupt that arrives within a finalizer is raised again after it.

    Yields:
        Nothing.

    Raises:
        SignalReceived: If a signal arrives.
        KeyboardInterrupt: After Ctrl-C.
    """
    waiting, is_repeated, show_unraisable = False, False, sys.unraisablehook

    def interrupt_again() -> None:
        nonlocal is_repeated
        is_repeated = True
        _thread.interrupt_main()

    def interrupt_soon() -> None:
        timer = threading.Timer(IMPORT_POLL_S, interrupt_again)
        timer.daemon = True
        timer.start()

    def handle_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
        # Python prints and forgets an exception within a finalizer.
        if unraisable.exc_type is not None and issubclass(unraisable.exc_type, KeyboardInterrupt):
            interrupt_soon()
        else:
            show_unraisable(unraisable)

    def handle_interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal waiting, is_repeated
        by_user, is_repeated = not is_repeated, False
        if not _is_importing_extension(frame) or (waiting and by_user):
            raise KeyboardInterrupt
        waiting = True
        interrupt_soon()

    def handle_signal(number: int, _: FrameType | None) -> None:
        raise SignalReceived(signal.Signals(number))

    handled = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, handle_signal)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle_interrupt)
        sys.unraisablehook = handle_unraisable
    try:
        yield
    finally:
        sys.unraisablehook = show_unraisable
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is handle_interrupt:
            signal.signal(signal.SIGINT, interrupt)


def _is_importing_extension(frame: FrameType | None) -> bool:
    """Whether a frame belongs to the import of an extension module, or of torch, which calls C++
    code that calls Python.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_qualname.startswith("ExtensionFileLoader."):
            return True
        if code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            return True
        frame = frame.f_back
    return False


def ignore_interrupts() -> None:
    """Ignore Ctrl-C from now on: a second one would print a traceback while the process ends.

    Python's own handler stays: then another program has called the command, and continues after it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def interrupts_are_ignored() -> bool:
    """Check whether ``ignore_interrupts`` was called, which is before the line about a stop.

    Returns:
        Whether it was.
    """
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN
