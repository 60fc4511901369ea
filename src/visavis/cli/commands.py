"""Commands of the command line, generated from the signatures and docstrings of the functions in
``visavis.api``.

Positional parameters become arguments, keyword-only parameters become options. The summary of the
docstring is the help of the command, the first sentence of each entry in ``Args`` and its default
are the help of the parameter.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from typer.core import TyperArgument

from visavis import __version__, api
from visavis.api.catalog_entries import docstring_arguments, docstring_summary
from visavis.cli.help_texts import CommandGroup, CommandWithMovedOptions, examples_of, panel_of
from visavis.cli.logs import log_to_stderr
from visavis.cli.terminal import (
    SignalReceived,
    ignore_interrupts,
    print_error,
    print_json,
    print_line,
)
from visavis.core.command import Command
from visavis.core.errors import ReportedByOtherProcess, SpecError, VisavisError, format_value
from visavis.core.own_code import allow_code, find_part, installed_names, named_parts
from visavis.core.progress import NoProgress

if TYPE_CHECKING:
    from visavis.data.features.store import FeatureStore

Values = dict[str, Any]


def _demo_to_json(folder: Path, _: Values) -> Values:
    from visavis.core import storage

    table = storage.read_json(folder / "table.json", dict[str, Any])
    return {"folder": str(folder), "report": str(folder / "report.html"), **table}


def _stores_to_json(stores: list[FeatureStore], _: Values) -> Values:
    def properties(store: FeatureStore) -> Values:
        granularity = store.description.granularity
        return {
            "folder": str(store.folder),
            "rows": len(store),
            "embedding_dim": store.embedding_dim,
            "granularity": granularity,
        }

    return {"stores": [properties(store) for store in stores]}


def _classification_to_json(result: Any, values: Values) -> Values:
    if not isinstance(result, list):
        return result.to_json()
    texts = [{"text": text, "score": score} for text, score in result]
    return {"image": values["images"], "texts": texts}


COMMANDS = {
    "demo": Command(to_json=_demo_to_json),
    "doctor": Command(
        printer="printers:print_environment",
        has_all=True,
        to_json=lambda checks, _: {
            check.name: {"value": check.value, "ok": check.ok, "fix": check.fix} for check in checks
        },
        has_failed=lambda checks: not all(check.ok for check in checks),
    ),
    "catalog": Command(printer="printers:print_catalog", to_json=lambda entries, _: entries),
    "data_check": Command(
        printer="printers:print_check", has_all=True, has_failed=lambda report: not report.ok
    ),
    "data_audit": Command(printer="printers:print_audit", has_all=True),
    "data_convert": Command(printer="printers:print_converted", options=("out",)),
    "data_scenes": Command(
        printer="printers:print_scenes",
        to_json=lambda folder, _: {"folder": str(folder)},
        options=("out",),
    ),
    "features": Command(
        printer="printers:print_feature_stores", to_json=_stores_to_json, shares_work=True
    ),
    "train": Command(resumable=True, shares_work=True),
    "evaluate": Command(),
    "mteb": Command(),
    "data_mine": Command(),
    "compare": Command(resumable=True),
    "explain": Command(),
    "export": Command(),
    "index": Command(),
    "search": Command(
        printer="search_printer:print_results",
        has_all=True,
        # Without a run, the text query is the only argument.
        to_json=lambda results, values: {
            "query": values.get("query", str(values["run"]) if "collection" in values else ""),
            **results.to_json(),
        },
    ),
    "indexes_evaluate": Command(),
    "indexes_list_queries": Command(),
    "indexes_use_queries": Command(),
    "indexes_restore_queries": Command(),
    "indexes_correct": Command(),
    "indexes_export": Command(),
    "indexes_export_votes": Command(),
    "indexes_measure": Command(),
    "indexes_compress": Command(),
    "indexes_calibrate": Command(
        to_json=lambda basis, values: {"folder": str(values["index"]), "basis": basis}
    ),
    "indexes_move": Command(
        to_json=lambda report, values: (
            {"folder": str(values["index"])} if report is None else report.to_json()
        ),
    ),
    "indexes_prune": Command(),
    "indexes_default_model": Command(to_json=lambda model, _: {"model": model}),
    "classify": Command(printer="printers:print_classification", to_json=_classification_to_json),
    "serve": Command(has_result=False),
    "mcp": Command(has_result=False),
}
"""The commands by the name of their API function, in the order of the help. `command_words` gives
their words. Further ones are registered, see `registered_commands`.
"""

GROUPS: dict[str, str | None] = {
    "data": "Check, audit, convert and create data sets, and mine negatives.",
    "indexes": "Change, measure and evaluate existing indexes.",
    "papers": "Reproduce published tables, and diagnose models as papers do.",
    "papers_relevance": None,
}
"""Help of the groups of commands, outer groups first. The group ``papers relevance`` is a command as
well.
"""

ENVIRONMENT_VARIABLES = {"token": "VISAVIS_TOKEN"}
"""Environment variables that set an option."""

METAVARS = {
    "basis": "BASIS",
    "overrides": "KEY=VALUE",
    "memory": "SIZE",
    "item_bytes": "SIZE",
    "workers": "NUMBER",
}
"""Values of parameters in the help, where the type does not decide."""
METAVARS_BY_TYPE: dict[type, str] = {Path: "PATH", str: "TEXT", int: "INTEGER", float: "NUMBER"}
"""Values of parameters in the help, by the first type that a parameter accepts."""


@dataclass(frozen=True)
class ParameterType:
    """How the command line reads a parameter of an API function.

    Attributes:
        kind: Type of a value: a choice, bool, int, float or str.
        metavar: Value in the help. None for choices and switches, which list their values.
        container: ``Sequence`` or ``Mapping`` if the option can be repeated, else None.
        is_single: Whether one value is passed as it is, instead of a list of one.
        is_path: Whether a text is a path.
    """

    kind: Any
    metavar: str | None
    container: type | None
    is_single: bool
    is_path: bool


def build_app(first_word: str = "") -> typer.Typer:
    """Build the command line from the functions in ``visavis.api``. If the first word is a command or
    a group, only this is built, so that the modules of other commands are not imported.
    """
    if first_word.partition("=")[0] == "--code":
        _allow_leading_code(sys.argv[1:])
    is_group = any(command_words(name)[0] == first_word for name in GROUPS)
    commands = {n: each for n, each in COMMANDS.items() if command_words(n)[0] == first_word}
    if is_group:
        commands |= registered_commands(first_word)
    # The main help lists groups of commands, not the commands in them.
    is_main_help = first_word == "--help"
    commands = commands or COMMANDS | registered_commands(first_word if is_main_help else "")
    # Typer adds the Python type of an argument to its name, such as list[str].
    setattr(TyperArgument, "display_type_rich", lambda self, ctx: None)  # noqa: B010, ARG005
    app = typer.Typer(
        name="visavis",
        cls=CommandGroup,
        help="Train, evaluate, diagnose and use vision-language retrieval.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_main_options)
    groups: dict[tuple[str, ...], typer.Typer] = {(): app}
    for name, text in GROUPS.items():
        is_command = name in commands
        groups[command_words(name)] = typer.Typer(
            help=text,
            no_args_is_help=not is_command,
            invoke_without_command=is_command,
            rich_markup_mode=None,
        )
    for name, command in commands.items():
        words = command_words(name)
        *outer, word = words
        decorate = (
            groups[words].callback
            if name in GROUPS
            else partial(groups[*outer].command, word, cls=CommandWithMovedOptions)
        )
        function = function_of(name, command)
        decorate(
            help=docstring_summary(function),
            epilog=examples_of(function),
            rich_help_panel=panel_of(name),
        )(_callback(name, command))
    shown = [*commands, *(installed_names("commands") if is_main_help else ())]
    first_words = {command_words(name)[0] for name in shown}
    for name in GROUPS:
        *outer, word = words = command_words(name)
        if words[0] in first_words:
            groups[*outer].add_typer(groups[words], name=word, rich_help_panel=panel_of(name))
    return app


def registered_commands(first_word: str = "") -> dict[str, Command]:
    """Return the commands of named sources and of installed packages by name. A package is loaded
    only for its own commands, and for the main help if it adds one outside of a group.
    """
    installed = list[Command | None]()
    for name in installed_names("commands"):
        words = command_words(name)
        if first_word in ("", words[0]) or (first_word == "--help" and len(words) == 1):
            installed.append(find_part(name, {}, Command, "commands"))
    commands = dict[str, Command]()
    for command in [*named_parts(Command), *installed]:
        name = getattr(command.function, "__name__", "") if command is not None else ""
        if command is None or not name or name in COMMANDS:
            raise SpecError(
                f"{name or 'a command'}: expected a command with a function and a name of its own, "
                "got the name of a command of visavis. Rename the function."
            )
        commands[name] = command
    return commands


def function_of(name: str, command: Command) -> Callable[..., Any]:
    """Return the function of a command."""
    function: Callable[..., Any] = command.function or getattr(api, name)
    return function


def _allow_leading_code(arguments: Sequence[str]) -> None:
    """Allow the sources of the options ``--code`` before the command, which may be one of them."""
    words = list(arguments)
    while words and words[0].partition("=")[0] == "--code":
        option = words.pop(0)
        source = option.partition("=")[2] or (words.pop(0) if words else "")
        if source:
            allow_code(source)


def command_words(name: str) -> tuple[str, ...]:
    """Return the words of a command or group: ``data_check`` is the command ``data check``."""
    outer = [group for group in GROUPS if name.startswith(f"{group}_")]
    group = max(outer, key=len, default="")
    word = name.removeprefix(f"{group}_").replace("_", "-")
    return (*command_words(group), word) if group else (word,)


def _print_version(is_set: bool) -> None:
    if is_set:
        print_line(f"visavis {__version__}")
        raise typer.Exit


def _main_options(
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    code: Annotated[
        list[str] | None,
        typer.Option(
            "--code",
            metavar="FILE",
            help="Python file, or package, with own parts that recipes or runs name. Can be repeated.",
        ),
    ] = None,
) -> None:
    """The options of ``visavis`` before a command."""
    allow_code(*(code or ()))


def _callback(name: str, command: Command) -> Callable[..., None]:
    """The function that Typer calls, with a signature that Typer reads."""
    function = function_of(name, command)
    parameters = inspect.signature(function).parameters
    types = parameter_types(function)
    arguments = [
        key
        for key, parameter in parameters.items()
        if parameter.kind != parameter.KEYWORD_ONLY and key not in command.options
    ]
    # Of `RUN... QUERY`, Typer gives the last word to QUERY, so a single word arrives there,
    # although the query is the optional one.
    split_last = (
        arguments[:2] if len(arguments) == 2 and types[arguments[0]].container is not None else None
    )

    def run(
        *,
        context: typer.Context | None = None,
        json: bool = False,
        print_all: bool = False,
        verbose: bool,
        quiet: bool,
        **values: Any,
    ) -> None:
        if context is not None and context.invoked_subcommand is not None:
            return
        if verbose and quiet:
            raise VisavisError(
                "--verbose, --quiet: expected at most one, got both. Remove one of them."
            )
        _check_processes(name, command)
        values = _convert_values(values, parameters, types, split_last)
        with ExitStack() as stack:
            stack.enter_context(log_to_stderr(verbose=verbose, quiet=quiet))
            stack.enter_context(_stops_in_one_line(name))
            if command.resumable:
                stack.enter_context(_resume_hint(name))
            if "progress" in parameters and quiet:
                values["progress"] = NoProgress()
            elif "progress" in parameters:
                from visavis.cli.console import ProgressBars

                # A server that has started shows no progress.
                title = " ".join(command_words(name)) if command.has_result else ""
                values["progress"] = stack.enter_context(ProgressBars(title))
            result = function(**values)
        # Of the processes of torchrun, the first one prints the result.
        if command.shares_work and not _is_first_process():
            return
        results = result if isinstance(result, list | tuple) else [result]
        if json:
            print_json(command.to_json(result, values))
        elif result is not None and (
            command.printer or all(hasattr(each, "tables") for each in results)
        ):
            printer = command.printer or "console:print_result"
            if isinstance(printer, str):
                printer = resolve_name(f"visavis.cli.{printer}")
            printer(result, **({"print_all": print_all} if command.has_all else {}))
        if command.has_failed(result):
            raise typer.Exit(1)

    run.__name__ = name
    run.__signature__ = _signature(name, command, types, arguments, split_last)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _check_processes(name: str, command: Command) -> None:
    """Refuse several processes of torchrun for a command that does not share its work. One of them
    reports it.
    """
    if (
        command.shares_work
        or "TORCHELASTIC_RUN_ID" not in os.environ
        or (processes := int(os.environ["WORLD_SIZE"])) == 1
    ):
        return
    if not _is_first_process():
        raise ReportedByOtherProcess(
            "The first process reports that the command needs one process."
        )
    sharing = " and ".join(
        sorted(each for each, properties in COMMANDS.items() if properties.shares_work)
    )
    raise VisavisError(
        f"{' '.join(command_words(name))}: expected one process, got {processes}. Start it without "
        f"torchrun, which {sharing} support."
    )


def _signature(
    name: str,
    command: Command,
    types: Mapping[str, ParameterType],
    arguments: list[str],
    split_last: list[str] | None,
) -> inspect.Signature:
    """The parameters of an API function, arguments first, and the options that all commands have."""
    function = function_of(name, command)
    parameters = inspect.signature(function).parameters
    texts = docstring_arguments(function)
    ordered = sorted(parameters, key=lambda key: (key not in arguments, key != "overrides"))
    result = [
        _typer_parameter(
            parameters[key],
            types[key],
            texts.get(key, ""),
            is_argument=key in arguments,
            split_last=split_last,
        )
        for key in ordered
        if key != "progress"
    ]
    if command.has_result:
        result.append(_flag("json", "Print one JSON object instead of text.", "--json"))
    if command.has_all:
        result.append(
            _flag(
                "print_all",
                "Print everything, not only the first or most important lines.",
                "--all",
            )
        )
    result.append(
        _flag(
            "verbose",
            "Print debug messages, such as the chosen computation path.",
            "--verbose",
            "-v",
        )
    )
    result.append(
        _flag(
            "quiet",
            "Print no progress and no notes. Results, warnings and errors remain.",
            "--quiet",
            "-q",
        )
    )
    if name in GROUPS:
        result.append(_keyword("context", typer.Context))
    return inspect.Signature(result)


def _flag(name: str, text: str, *option_names: str) -> inspect.Parameter:
    return _keyword(name, Annotated[bool, typer.Option(*option_names, help=text)], False)


def parameter_types(function: Callable[..., Any]) -> dict[str, ParameterType]:
    """Read the types of the parameters of an API function."""
    types = dict[str, ParameterType]()
    for name, annotation in function.__annotations__.items():
        if name == "return":  # imported for type checking only: its module imports torch
            continue
        is_text = isinstance(annotation, str)
        hint = _evaluate(annotation, function.__module__) if is_text else annotation
        members = _members(hint)
        containers = [each for each in members if get_origin(each) in (Sequence, Mapping, dict)]
        singles = [each for each in members if each not in containers]
        kinds = [*singles, *(kind for each in containers for kind in _members(get_args(each)[0]))]
        container = get_origin(containers[-1]) if containers else None
        is_choice = kinds[0] is bool or get_origin(kinds[0]) is Literal
        metavar = "NAME=VALUE" if container is Mapping else None
        if not is_choice and metavar is None:
            metavar = METAVARS.get(name) or next(
                (shown for kind, shown in METAVARS_BY_TYPE.items() if kind in kinds), None
            )
        is_number = kinds[0] in (int, float) and str not in kinds
        types[name] = ParameterType(
            # A number or a text is read as a text, which the function converts.
            kind=kinds[0] if is_choice or is_number else str,
            metavar=metavar,
            container=container,
            is_single=bool(singles),
            is_path=Path in kinds,
        )
    return types


# Modules repeat their annotations. Without the cache, a start takes 3 ms more.
@cache
def _evaluate(annotation: str, module: str) -> Any:
    """The type behind the text of an annotation, with the names of a module."""
    stub = SimpleNamespace(__annotations__={"parameter": annotation})
    return get_type_hints(stub, vars(sys.modules[module]))["parameter"]


def _members(hint: Any) -> list[Any]:
    """The types of a union, without None."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [kind for kind in kinds if kind is not NoneType]


def _typer_parameter(
    parameter: inspect.Parameter,
    parsed: ParameterType,
    text: str,
    *,
    is_argument: bool,
    split_last: list[str] | None,
) -> inspect.Parameter:
    """A parameter of an API function as an argument or option of Typer."""
    name = parameter.name
    is_repeatable = parsed.container is not None
    required = parameter.default is parameter.empty
    default = None if parameter.default in ("", ()) or is_repeatable else parameter.default
    kind = list[parsed.kind] if is_repeatable else parsed.kind  # type: ignore[name-defined]
    if is_argument or name == "overrides":
        if is_argument and split_last:
            required = name == split_last[1]
            default = None
        metavar = METAVARS.get(name, name.removesuffix("s").upper())
        info: Any = typer.Argument(metavar=metavar, help=_help(text))
    else:
        option = f"--{name.replace('_', '-')}"
        # A switch that is on by default has a second name that turns it off.
        if kind is bool and parameter.default is not False:
            option = f"{option}/--no-{option[2:]}"
        info = typer.Option(
            option,
            metavar=parsed.metavar,
            help=f"{_help(text)} Can be repeated." if is_repeatable else _help(text),
            envvar=ENVIRONMENT_VARIABLES.get(name),
        )
    if not required and default is None:
        kind = kind | None
    return _keyword(name, Annotated[kind, info], inspect.Parameter.empty if required else default)


def _keyword(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _help(text: str) -> str:
    """The first sentence of a description, and its default."""
    first, *further = re.split(r"(?<=\.) (?=[A-Z])", text)
    return " ".join([first, *(sentence for sentence in further if sentence.startswith("Default"))])


def _convert_values(
    values: Values,
    parameters: Mapping[str, inspect.Parameter],
    types: Mapping[str, ParameterType],
    split_last: list[str] | None,
) -> Values:
    """The arguments of the API function: unset values are left out, so that its defaults apply."""
    if split_last and not values[split_last[0]]:
        values |= {split_last[0]: [values[split_last[1]]], split_last[1]: None}
    values = {name: value for name, value in values.items() if value is not None and value != []}
    if "overrides" in parameters:
        first = next(iter(parameters))
        if parameters[first].default is None and "=" in values.get(first, ""):
            values["overrides"] = [values.pop(first), *values.get("overrides", [])]
    for name, value in values.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                _check_text(name, text, is_path=types[name].is_path)
        if name == "overrides":
            continue
        if types[name].is_path:
            value = [*map(_expand, value)] if isinstance(value, list) else _expand(value)
            values[name] = value
        if types[name].container is Mapping:
            values[name] = _split_pairs(name, value)
        elif types[name].container is not None and types[name].is_single and len(value) == 1:
            values[name] = value[0]
    return values


def _expand(path: Any) -> Any:
    """A path with the home folder in place of ``~``, which a shell keeps in ``--out=~/index``."""
    is_in_home = isinstance(path, str) and (path == "~" or path.startswith(("~/", f"~{os.sep}")))
    return os.path.expanduser(path) if is_in_home else path


def _check_text(name: str, text: str, *, is_path: bool) -> None:
    """Reject what is not Unicode, and paths that the operating system rejects."""
    try:
        # A path may contain bytes that are not UTF-8.
        encoded = os.fsencode(text) if is_path else text.encode()
    except UnicodeEncodeError:
        raise VisavisError(
            f"{name}: expected {'a path' if is_path else 'a text'} of valid Unicode, got "
            f"{format_value(text)}. Remove lone surrogates."
        ) from None
    too_long = (
        len(encoded) >= 4096
        or max(map(len, encoded.replace(os.fsencode(os.sep), b"/").split(b"/"))) > 255
    )
    if is_path and (b"\0" in encoded or (too_long and b"://" not in encoded)):
        raise VisavisError(
            f"{name}: expected a path whose names have at most 255 bytes and no NUL, got "
            f"{format_value(text)}. Shorten it."
        )


def _split_pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    values = dict[str, str]()
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise VisavisError(
                f"--{option}: expected NAME=VALUE such as split=test, got {text!r}. Add the value."
            )
        if name in values:
            raise VisavisError(
                f"--{option}: expected each name once, got {name} twice. Remove one of them."
            )
        values[name] = value
    return values


@contextmanager
def _stops_in_one_line(name: str) -> Iterator[None]:
    """After Ctrl-C, print one line about what is kept and how to continue, and exit with the
    shell's code.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        ignore_interrupts()
        kept = " ".join(getattr(stop, "__notes__", ())) or "No result was written."
        print_error(f"Stopped. {kept} {_how_to_continue_after(stop, name)}")
        raise typer.Exit(128 + signal.SIGINT) from None
    except SignalReceived as stop:
        # ``main`` prints the name of the signal and these sentences.
        stop.add_note(_how_to_continue_after(stop, name))
        raise


def _how_to_continue_after(stop: BaseException, name: str) -> str:
    """How to continue a command that an exception stopped."""
    from visavis.core.stopping import resumed_folder

    return _how_to_continue(name, resumed_folder(stop))


def _how_to_continue(name: str, folder: str | None) -> str:
    """How to continue a stopped command: with ``--resume``, or by repeating it."""
    from visavis.core.environment import shell_command

    program = shell_command()
    if folder is None:
        return f"Repeat it with: {program} {shlex.join(sys.argv[1:])}"
    return (
        f"Continue with: {program} {' '.join(command_words(name))} --resume {shlex.quote(folder)}"
    )


@contextmanager
def _resume_hint(name: str) -> Iterator[None]:
    """Print how to continue after a signal that stopped a training, and exit with the shell's code."""
    from visavis.training.stop_signals import Stopped

    try:
        yield
    except Stopped as stopped:
        ignore_interrupts()
        processes = (
            ""
            if os.environ.get("WORLD_SIZE", "1") == "1"
            else " torchrun may start any number of processes."
        )
        print_error(
            f"Stopped. Everything is saved.{processes} {_how_to_continue(name, str(stopped))}"
        )
        raise typer.Exit(128 + stopped.signal) from None
