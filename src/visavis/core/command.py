"""Description of a command of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """A command, whose arguments, options and help follow from the signature and the docstring of
    its function. A source of your own or an installed package adds it to ``visavis``.

    The name of the function gives the words: ``count_words`` is ``visavis count-words``, and
    ``data_count_words`` is ``visavis data count-words``.

    Args:
        function: Its positional parameters are arguments, and its keyword-only parameters are
            options. The docstring has the sections ``Args:`` and ``Command line:``. None: the
            function of ``visavis.api`` with the name of the command.
        printer: Function that prints the result, or its module of ``visavis.cli`` and its name.
            Default: the tables of the result, if it is a `Result` or a list of them.
        to_json: Converts a result and the arguments to JSON. Default: the method ``to_json`` of the
            result.
        options: Positional parameters of the function that are options of the command.
        has_all: Whether the printer has an argument for the option --all.
        has_failed: Returns whether the exit code is 1.
        resumable: Whether Ctrl-C leaves something that --resume continues.
        has_result: Whether the command ends with a result. A server has none.
        shares_work: Whether several processes of torchrun share its work.
    """

    function: Callable[..., Any] | None = None
    printer: str | Callable[..., None] = ""
    to_json: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda result, _: result.to_json()
    options: tuple[str, ...] = ()
    has_all: bool = False
    has_failed: Callable[[Any], bool] = lambda _: False
    resumable: bool = False
    has_result: bool = True
    shares_work: bool = False
