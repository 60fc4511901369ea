"""Commands of the command line, generated from the signatures and docstrings of the functions in
``visavis.api``.

Positional parameters become arguments, keyword-only parameters become options. The summary of the
docstring is the help of the command, the first sentence of each entry in ``Args`` and its default
are the help of the parameter.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperArgument

from visavis import __version__, api
from visavis.api.catalog_entries import docstring_arguments, docstring_summary
from visavis.cli.help_texts import CommandGroup, examples_of, panel_of
from visavis.cli.logs import log_to_stderr
from visavis.cli.terminal import print_error, print_json, print_line
from visavis.core.errors import ReportedByOtherProcess, VisavisError
from visavis.core.own_code import allow_code
from visavis.core.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.data.features.store import FeatureStore

Values = dict[str, Any]


class Command(NamedTuple):
    """Properties of a command that do not follow from its API function.

    Attributes:
        printer: Module of ``visavis.cli`` and its function that prints the result. Default: the
            progress messages are enough.
        to_json: Converts a result and the arguments to JSON.
        options: Positional parameters of the function that are options of the command.
        has_all: Whether the printer has an argument for the option --all.
        has_failed: Returns whether the exit code is 1.
        resumable: Whether Ctrl-C leaves something that --resume continues.
        has_result: Whether the command ends with a result. A server has none.
        shares_work: Whether several processes of torchrun share its work.
    """

    printer: str = ""
    to_json: Callable[[Any, Values], Values] = lambda result, _: result.to_json()
    options: tuple[str, ...] = ()
    has_all: bool = False
    has_failed: Callable[[Any], bool] = lambda _: False
    resumable: bool = False
    has_result: bool = True
    shares_work: bool = False


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


def _query(values: Values) -> str:
    """The text query. Without a run, it is the only argument."""
    return values.get("query", str(values["run"]) if "collection" in values else "")


def _entries_to_json(key: str) -> Callable[[Any, Values], Values]:
    return lambda entries, _: {key: [entry.to_json() for entry in entries]}


COMMANDS = {
    "demo": Command(to_json=_demo_to_json),
    "doctor": Command(
        "dataset_tables:print_environment",
        to_json=lambda checks, _: {
            check.name: {"value": check.value, "ok": check.ok, "fix": check.fix} for check in checks
        },
        has_failed=lambda checks: not all(check.ok for check in checks),
    ),
    "catalog": Command("dataset_tables:print_catalog", to_json=lambda entries, _: entries),
    "data_check": Command(
        "dataset_tables:print_check", has_all=True, has_failed=lambda report: not report.ok
    ),
    "data_audit": Command("dataset_tables:print_audit", has_all=True),
    "data_convert": Command("dataset_tables:print_converted", options=("out",)),
    "data_scenes": Command(
        "dataset_tables:print_scenes",
        to_json=lambda folder, _: {"folder": str(folder)},
        options=("out",),
    ),
    "features": Command(
        "dataset_tables:print_feature_stores", to_json=_stores_to_json, shares_work=True
    ),
    "convert": Command(
        "dataset_tables:print_converted_model",
        to_json=lambda converted, _: converted.to_recipe_sections(),
        options=("out",),
    ),
    "train": Command("run_tables:print_trained", resumable=True, shares_work=True),
    "evaluate": Command("run_tables:print_evaluation"),
    "mteb": Command("run_tables:print_mteb_report"),
    "mine": Command("run_tables:print_mining"),
    "compare": Command("experiment_tables:print_comparison", resumable=True),
    "reproduce": Command("experiment_tables:print_reproduction", resumable=True),
    "diagnose": Command("diagnostic_tables:print_diagnosis"),
    "probe": Command("diagnostic_tables:print_probes"),
    "explain": Command("diagnostic_tables:print_explanation"),
    "anatomy": Command("diagnostic_tables:print_objective_profiles"),
    "coherence": Command("experiment_tables:print_coherence"),
    "agreement": Command(
        "experiment_tables:print_agreement", to_json=_entries_to_json("agreement")
    ),
    "relevance": Command(
        "experiment_tables:print_estimator_evaluation",
        to_json=_entries_to_json("estimators"),
        options=("estimator",),
    ),
    "relevance_thresholds": Command(
        "experiment_tables:print_distributions", to_json=_entries_to_json("estimators")
    ),
    "relevance_fit": Command("experiment_tables:print_fitted", options=("out",)),
    "export": Command("run_tables:print_exported"),
    "index": Command("search_tables:print_index_report"),
    "search": Command(
        "search_tables:print_results",
        to_json=lambda results, values: {"query": _query(values), **results.to_json()},
    ),
    "classify": Command(
        "search_tables:print_ranked_texts",
        to_json=lambda texts, values: {
            "image": values["image"],
            "texts": [{"text": text, "score": score} for text, score in texts],
        },
    ),
    "serve": Command(has_result=False),
}
"""The commands by the name of their API function, in the order of the help. ``data_check`` is the
command ``data check``.
"""

GROUPS: dict[str, str | None] = {
    "data": "Check, audit, convert and create data sets.",
    "relevance": None,
}
"""Help of the groups of commands. The group ``relevance`` is a command as well."""

ENVIRONMENT_VARIABLES = {"token": "VISAVIS_TOKEN"}
"""Environment variables that set an option."""

SIMPLE_TYPES = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "str | int": str,
    "str | Path": str,
    "MemoryLimit": str,
}
METAVARS = {
    "bool": None,
    "Literal": None,
    "Mapping": "NAME=VALUE",
    "Path": "PATH",
    "str": "TEXT",
    "int": "INTEGER",
    "float": "NUMBER",
    "Mem": "SIZE",
}
"""Values of options in the help, by the first part that an annotation has. Choices are listed
instead.
"""


def build_app() -> typer.Typer:
    """Build the command line from the functions in ``visavis.api``.

    Returns:
        The application with all commands.
    """
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
    groups = {"": app}
    for name, text in GROUPS.items():
        is_command = name in COMMANDS
        groups[name] = typer.Typer(
            help=text,
            no_args_is_help=not is_command,
            invoke_without_command=is_command,
            rich_markup_mode=None,
        )
    for name, command in COMMANDS.items():
        group, _, word = name.rpartition("_")
        decorate = groups[name].callback if name in GROUPS else partial(groups[group].command, word)
        summary = docstring_summary(getattr(api, name))
        decorate(help=summary, epilog=examples_of(name), rich_help_panel=panel_of(name))(
            _callback(name, command)
        )
    for name in GROUPS:
        app.add_typer(groups[name], name=name, rich_help_panel=panel_of(name))
    return app


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
            help="Python file, or package, with own parts that stored files name. Can be repeated.",
        ),
    ] = None,
) -> None:
    """The options of ``visavis`` before a command."""
    allow_code(*(code or ()))


def _callback(name: str, command: Command) -> Callable[..., None]:
    """The function that Typer calls, with a signature that Typer reads."""
    parameters = inspect.signature(getattr(api, name)).parameters
    arguments = [
        key
        for key, parameter in parameters.items()
        if parameter.kind != parameter.KEYWORD_ONLY and key not in command.options
    ]
    # Of `RUN... QUERY`, Typer gives the last word to QUERY, so a single word arrives there,
    # although the query is the optional one.
    split_last = (
        arguments[:2] if len(arguments) == 2 and _is_repeatable(parameters[arguments[0]]) else None
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
        values = _convert_values(values, parameters, split_last)
        with ExitStack() as stack:
            stack.enter_context(log_to_stderr(verbose=verbose, quiet=quiet))
            if command.resumable:
                stack.enter_context(_resume_hint(name))
            if "progress" in parameters:
                values["progress"] = NoProgress() if quiet else _progress_bars(command, stack)
            result = getattr(api, name)(**values)
        # Of the processes of torchrun, the first one prints the result.
        if command.shares_work and not _is_first_process():
            return
        if json:
            print_json(command.to_json(result, values))
        elif command.printer:
            print_result = resolve_name(f"visavis.cli.{command.printer}")
            print_result(result, **({"print_all": print_all} if command.has_all else {}))
        if command.has_failed(result):
            raise typer.Exit(1)

    run.__name__ = name
    run.__signature__ = _signature(name, command, arguments, split_last)  # type: ignore[attr-defined]
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
        f"{name.replace('_', ' ')}: expected one process, got {processes}. Start it without "
        f"torchrun, which {sharing} support."
    )


def _progress_bars(command: Command, stack: ExitStack) -> Progress:
    """Progress on stderr. The bars of a server are not started, because they would be drawn over
    its log.
    """
    from visavis.cli.console import ProgressBars

    bars = ProgressBars()
    return stack.enter_context(bars) if command.has_result else bars


def _signature(
    name: str, command: Command, arguments: list[str], split_last: list[str] | None
) -> inspect.Signature:
    """The parameters of an API function, arguments first, and the options that all commands have."""
    function = getattr(api, name)
    parameters, texts = inspect.signature(function).parameters, docstring_arguments(function)
    ordered = sorted(parameters, key=lambda key: (key not in arguments, key != "overrides"))
    result = [
        _typer_parameter(
            parameters[key], texts[key], is_argument=key in arguments, split_last=split_last
        )
        for key in ordered
        if key != "progress"
    ]
    if command.has_result:
        result.append(_flag("json", "Print one JSON object instead of text.", "--json"))
    if command.has_all:
        result.append(
            _flag("print_all", "Print every finding, not only the first of each kind.", "--all")
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


def _typer_parameter(
    parameter: inspect.Parameter, text: str, *, is_argument: bool, split_last: list[str] | None
) -> inspect.Parameter:
    """A parameter of an API function as an argument or option of Typer."""
    name = parameter.name
    required = parameter.default is parameter.empty
    default = (
        None if parameter.default in ("", ()) or _is_repeatable(parameter) else parameter.default
    )
    kind = _cli_type(parameter.annotation)
    if name == "overrides":
        info: Any = typer.Argument(metavar="KEY=VALUE", help=_help(text))
    elif is_argument:
        if split_last:
            required, default = name == split_last[1], None
        info = typer.Argument(metavar=name.removesuffix("s").upper(), help=_help(text))
    else:
        option = f"--{name.replace('_', '-')}"
        names = (
            (f"{option}/--no-{option[2:]}" if parameter.default is not False else option,)
            if kind is bool
            else (option,)
        )
        metavar = next(
            (shown for part, shown in METAVARS.items() if part in parameter.annotation), None
        )
        text = f"{_help(text)} Can be repeated." if _is_repeatable(parameter) else _help(text)
        info = typer.Option(
            *names, metavar=metavar, help=text, envvar=ENVIRONMENT_VARIABLES.get(name)
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


def _is_repeatable(parameter: inspect.Parameter) -> bool:
    return "Sequence[" in parameter.annotation or "Mapping[" in parameter.annotation


def _cli_type(annotation: str) -> Any:
    """The type that Typer parses, from the text of an annotation: evaluating it would import torch."""
    text = annotation.removesuffix(" | None")
    if text.startswith("Literal["):
        return Literal[
            tuple(ast.literal_eval(text.removeprefix("Literal").replace("[", "(", 1)[:-1] + ",)"))
        ]
    if "Sequence[" in text or "Mapping[" in text:
        return list[float] if "Sequence[float]" in text else list[str]
    return SIMPLE_TYPES[text]


def _help(text: str) -> str:
    """The first sentence of a description, and its default."""
    first, *further = re.split(r"(?<=\.) (?=[A-Z])", text)
    return " ".join([first, *(sentence for sentence in further if sentence.startswith("Default"))])


def _convert_values(values: Values, parameters: Any, split_last: list[str] | None) -> Values:
    """The arguments of the API function: unset values are left out, so that its defaults apply."""
    if split_last and not values[split_last[0]]:
        values |= {split_last[0]: [values[split_last[1]]], split_last[1]: None}
    values = {name: value for name, value in values.items() if value is not None and value != []}
    if "overrides" in parameters:
        first = next(iter(parameters))
        if parameters[first].default is None and "=" in values.get(first, ""):
            values["overrides"] = [values.pop(first), *values.get("overrides", [])]
    for name, value in values.items():
        annotation = parameters[name].annotation
        if "Mapping[" in annotation and name != "overrides":
            values[name] = dict(_split_pair(name, text) for text in value)
        elif (
            isinstance(value, list)
            and len(value) == 1
            and name != "overrides"
            and not annotation.startswith("Sequence[")
        ):
            values[name] = value[0]
    return values


def _split_pair(option: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise VisavisError(
            f"--{option}: expected NAME=VALUE such as split=test, got {text!r}. Add the value."
        )
    return name, value


@contextmanager
def _resume_hint(command: str) -> Iterator[None]:
    """Print how to continue after a signal that stopped a training, and exit with the shell's code."""
    from visavis.core.environment import shell_command
    from visavis.training.stop_signals import Stopped

    try:
        yield
    except Stopped as stopped:
        processes = (
            ""
            if os.environ.get("WORLD_SIZE", "1") == "1"
            else " torchrun may start any number of processes."
        )
        print_error(
            f"Stopped. Everything is saved.{processes} Continue with: {shell_command()} {command} "
            f"--resume {stopped}"
        )
        raise typer.Exit(128 + stopped.signal) from None
