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
import time
from collections.abc import Callable, Iterator
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


def escape_line(text: str) -> str:
    r"""Escape control characters and newlines, as in a line that contains a file name.

    Args:
        text: Text of any origin.

    Returns:
        Text of one line that does not control a terminal.

    Example:
        >>> print(escape_line("a\nb.jpg"))
        a\nb.jpg
    """
    return escape_control_characters(text).replace("\n", "\\n")


def escape_unencodable_output() -> None:
    """Make stdout and stderr escape characters that they cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_error(text: str) -> None:
    """Print one line on stderr. Errors of a closed terminal are ignored."""
    with contextlib.suppress(OSError):
        print(escape_line(text), file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """Print a text on stdout."""
    try:
        print(escape_control_characters(text), flush=True)
    except OSError as error:
        # On Windows, a pipe without a reader is an invalid argument.
        if error.errno not in (errno.EPIPE, errno.EINVAL):
            raise
        exit_quietly()


def print_json(content: dict[str, Any]) -> None:
    """Print one line of JSON on stdout. Numbers that are not finite are printed as null."""
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


RAISE_AGAIN_S = 0.05
"""Seconds until a signal is raised again that could not be raised, or whose exception got lost."""


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise SignalReceived on a signal in this block, and KeyboardInterrupt on Ctrl-C. Ignored
    signals stay ignored (``nohup``).
    """
    handled = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handled.append(signal.SIGINT)
    before = {number: signal.getsignal(number) for number in handled}
    # An exception that Python or a library drops, for example in a finalizer, is raised again.
    show_unraisable = sys.unraisablehook
    raiser = _SignalRaiser(show_unraisable)
    for number in handled:
        signal.signal(number, raiser.handle)
    sys.unraisablehook = raiser.handle_unraisable
    try:
        yield
        raiser.raise_lost()
    except SignalReceived:
        raise
    except BaseException as error:
        # A library has replaced the exception, or the command ended before it was raised again.
        raiser.raise_lost(error)
        raise
    finally:
        raiser.is_active = False
        sys.unraisablehook = show_unraisable
        for number, handler in before.items():
            if signal.getsignal(number) == raiser.handle:
                signal.signal(number, handler)


class _SignalRaiser:
    """Raises signals in the main thread until their exceptions leave the block.

    Args:
        show_unraisable: Function that prints an exception that Python drops.
    """

    def __init__(self, show_unraisable: Callable[[sys.UnraisableHookArgs], Any]):
        self.is_active = True
        self._show_unraisable = show_unraisable
        self._received: signal.Signals | None = None
        self._waits_for_import = False
        self._is_repeated = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise the exception of a signal, unless it is raised already."""
        received = signal.Signals(number)
        by_user = not self._is_repeated
        self._is_repeated = False
        is_interrupt = received is signal.SIGINT
        if not is_interrupt and self._received is None:
            _thread.start_new_thread(self._send_until_raised, (received,))
        if not is_interrupt:
            self._received = received
            if not by_user and _find_signal(sys.exc_info()[1]) is not None:
                return  # a block cleans up
        # The import of an extension is not interrupted, because C++ code ends the process with a
        # message of its own if an exception reaches it there. The signal waits for its end, a second
        # Ctrl-C does not.
        is_second_interrupt = is_interrupt and by_user and self._waits_for_import
        if _is_importing_extension(frame) and not is_second_interrupt:
            self._waits_for_import = True
            if is_interrupt:
                self._interrupt_again()
            return
        raise KeyboardInterrupt if is_interrupt else SignalReceived(received)

    def handle_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Print an exception that Python drops, as within a finalizer, if it is not of a signal."""
        kind = unraisable.exc_type
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._interrupt_again()
        elif kind is None or not issubclass(kind, SignalReceived):  # which is sent again
            self._show_unraisable(unraisable)

    def raise_lost(self, error: BaseException | None = None) -> None:
        """Raise SignalReceived if a signal arrived, in place of another end of the block."""
        if self._received is not None:
            raise _find_signal(error) or SignalReceived(self._received) from None

    def _interrupt_again(self) -> None:
        # A threading.Timer takes a lock, which the interrupted code may hold.
        _thread.start_new_thread(self._send, (signal.SIGINT,))

    def _send_until_raised(self, number: signal.Signals) -> None:
        """Repeat a signal, because a library may drop or store its exception. A handler that a
        training or a server installed meanwhile receives it once: a second signal would end them at
        once.
        """
        receivers: list[Any] = []
        while self.is_active:
            handler = signal.getsignal(number)
            if handler in receivers:
                time.sleep(RAISE_AGAIN_S)
                continue
            if handler != self.handle:
                receivers.append(handler)
            self._send(number)

    def _send(self, number: signal.Signals) -> None:
        time.sleep(RAISE_AGAIN_S)
        if not self.is_active:
            return
        self._is_repeated = True
        main = threading.main_thread().ident
        if hasattr(signal, "pthread_kill") and main is not None:
            signal.pthread_kill(main, number)  # also ends a system call that waits
        else:
            _thread.interrupt_main(number)


def _find_signal(error: BaseException | None) -> SignalReceived | None:
    """Find SignalReceived among an exception and those that it replaced."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, SignalReceived):
            return error
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None


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
    """Ignore Ctrl-C from now on: a second one would print a traceback while the process ends."""
    # Python's own handler stays: then another program has called the command, and continues after
    # it.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
