"""Code blocks and commands of the README and of the pages in docs, and an environment in which they
run.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import textwrap
import tomllib
import venv
from functools import cache
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[1]
DOCS = PROJECT / "docs"
PAGES = [
    "README.md",
    *sorted(path.relative_to(PROJECT).as_posix() for path in DOCS.rglob("*.md")),
]
"""README and all pages, relative to the project."""

_PATTERN = re.compile(
    r'^(?P<level>##|###) (?P<heading>[^\n]+)$|^=== "(?P<tab>[^"\n]+)"$'
    r'|^ *```(?P<language>\w*)(?: title="(?P<file>[^"\n]+)")?\n(?P<text>.*?)^ *```$',
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: Its language. Empty for output.
        text: Its content.
        file: The file that it shows or changes, if it has a title.
        section: The heading of level 2 above it.
        subsection: The heading of level 3 above it.
        tab: The tab that holds it.
        output: Output of the code: the block without language that follows directly.
    """

    language: str
    text: str
    file: str
    section: str
    subsection: str
    tab: str
    output: str | None = None


def read_blocks(page: str, *languages: str) -> list[Block]:
    """Read the blocks of a page in order. Without languages: all of them."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    blocks, section, subsection, tab, end = list[Block](), "", "", "", -1
    for match in _PATTERN.finditer(text):
        if match["heading"]:
            is_section = match["level"] == "##"
            section, subsection = (
                (match["heading"], "") if is_section else (section, match["heading"])
            )
            tab = ""
        elif match["tab"]:
            tab = match["tab"]
        elif match["language"] == "" and match.start() == end + 1:
            blocks[-1] = blocks[-1]._replace(output=match["text"])
        else:
            content, file = textwrap.dedent(match["text"]), match["file"] or ""
            blocks.append(Block(match["language"], content, file, section, subsection, tab))
            end = match.end()
    return [block for block in blocks if not languages or block.language in languages]


def split_commands(text: str) -> list[list[str]]:
    """The visavis commands of a shell block, as lists of words after the name."""
    lines = text.replace("\\\n", " ").splitlines()
    commands = [line.removeprefix("$ ") for line in lines]
    return [
        shlex.split(line, comments=True)[1:] for line in commands if line.startswith("visavis ")
    ]


def console_commands(page: str) -> list[list[str]]:
    """The commands that a page shows with their output, in order."""
    return [words for block in read_blocks(page, "console") for words in split_commands(block.text)]


def patch_file(text: str, diff: str) -> str:
    """A file after a diff without line numbers. The replaced lines must occur once."""
    lines = diff.splitlines()
    before, after = (
        "\n".join(line[1:] for line in lines if not line.startswith(sign)) for sign in "+-"
    )
    assert text.count(before) == 1, before
    return text.replace(before, after)


class Step(NamedTuple):
    """A command of a shell block, or a Python block.

    Attributes:
        text: The command with its further lines, or the code.
        output: Output that the page shows after it. None without output.
        is_python: Whether it is a Python block.
        file: File of the reader that the block shows, if it has a title.
    """

    text: str
    output: str | None = None
    is_python: bool = False
    file: str = ""


def read_steps(page: str) -> list[Step]:
    """Everything that a reader of a page runs, in order."""
    steps = list[Step]()
    for block in read_blocks(page, "sh", "console", "python"):
        if block.language == "python":
            steps.append(Step(block.text, block.output, is_python=True, file=block.file))
        else:
            steps += _shell_steps(block)
    return steps


def _shell_steps(block: Block) -> list[Step]:
    """The commands of a shell block. A command ends with its line or, after a backslash, with the
    next one. A loop is one command.
    """
    steps, command, is_console = list[Step](), "", block.language == "console"
    for line in block.text.splitlines():
        starts = not is_console or line.startswith("$ ")
        if not command and not starts:
            steps[-1] = steps[-1]._replace(output=f"{steps[-1].output or ''}{line}\n")
            continue
        command += line.removeprefix("$ ")
        if command.endswith("\\") or (command.startswith("for ") and line != "done"):
            command += "\n"
        else:
            steps += [Step(command)] if command and not command.startswith("#") else []
            command = ""
    return steps


def check_output(expected: str, printed: str, spread: float, free_row: str = "") -> None:
    """Compare what a page shows with what was printed.

    A line ``...`` stands for any lines, and ``...`` in a line for any text. Whole numbers are equal.
    Numbers with a decimal point differ by at most 0.001 or the share ``spread`` of the shown value.
    Not compared: times, numbers in names of files, intervals (after ± or around –), ranges of seeds,
    the numbers of the row ``free_row``, and all numbers with an infinite spread.
    """
    lines = [line.split() for line in printed.splitlines() if line.strip()]
    position, skips = 0, False
    for text in expected.splitlines():
        if text.strip() == "...":
            skips = True
        elif text.strip():
            found = next(
                (
                    number
                    for number in range(position, len(lines) if skips else position + 1)
                    if number < len(lines)
                    and _lines_agree(text.split(), lines[number], spread, free_row)
                ),
                None,
            )
            assert found is not None, f"the page shows: {text}\nprinted:\n{printed}"
            position, skips = found + 1, False
    assert skips or position == len(lines), f"the page shows less than is printed:\n{printed}"


def _lines_agree(expected: list[str], printed: list[str], spread: float, free_row: str) -> bool:
    if expected[0] == "range":  # of each column, empty where all seeds have the same value
        return printed[0] == "range"
    for place, (shown, found) in enumerate(zip_longest(expected, printed, fillvalue="")):
        if shown == "...":
            return True
        is_free = (
            spread == math.inf
            or expected[0] == free_row
            or "/" in shown
            or "".join(expected[place + 1 : place + 2]).rstrip(".,") in _TIMES
        )
        if not _words_agree(shown, found, spread, is_free):
            return False
    return True


_TIMES = {"s", "min", "h", "seconds", "minutes"}
_NUMBER = re.compile(r"((?:(?<=±))?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)")


def _words_agree(shown: str, found: str, spread: float, is_free: bool) -> bool:
    parts = _NUMBER.split(shown)
    others = _NUMBER.split(found)
    if parts[::2] != others[::2]:
        return False
    for number, (text, other) in enumerate(zip(parts, others, strict=True)):
        if number % 2 == 0 or is_free or parts[number - 1].endswith("±") or "–" in shown:
            continue
        value = float(text.replace(",", ""))
        allowed = max(0.001, spread * abs(value)) if "." in text else 0
        if abs(float(other.replace(",", "")) - value) > allowed:
            return False
    return True


class Installation:
    """A virtual environment that holds visavis and the extras that a page has installed so far.

    Packages are links to those of the tests, so nothing is downloaded. All other packages are
    absent.
    """

    def __init__(self, folder: Path):
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")
        (self.site / "visavis.pth").write_text(str(PROJECT / "src"), encoding="utf-8")
        for path in _top_files("visavis"):
            if path.suffix == ".dist-info":
                (self.site / path.name).symlink_to(path)
        self._script("visavis", "-m visavis")
        self._script("torchrun", "-m torch.distributed.run")
        self.install([])

    def _script(self, name: str, arguments: str) -> None:
        file = self.bin / name
        file.write_text(f'#!/bin/sh\nexec {self.bin}/python {arguments} "$@"\n', encoding="utf-8")
        file.chmod(0o755)

    def install(self, extras: list[str]) -> None:
        """Add the packages of extras of visavis, and what these need."""
        for name in package_names(tuple(extras)):
            for path in _top_files(name):
                link = self.site / path.name
                if not link.exists():
                    link.symlink_to(path)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a shell finds the programs of this environment first."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return kept | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "BROWSER": "true"}


def package_names(extras: tuple[str, ...]) -> set[str]:
    """Names of the distributions that ``pip install visavis[extras]`` installs."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    pending = [Requirement(text) for text in project["dependencies"]]
    pending += [Requirement(f"visavis[{extra}]") for extra in extras]
    names, seen = set[str](), set[str]()
    while pending:
        requirement = pending.pop()
        for extra in ("", *requirement.extras):
            if f"{requirement.name}[{extra}]" in seen:
                continue
            seen.add(f"{requirement.name}[{extra}]")
            if requirement.name == "visavis":
                needs = optional[extra] if extra else []
            else:
                needs = metadata.requires(requirement.name) or []
                names.add(requirement.name)
            found = [Requirement(text) for text in needs]
            pending += [
                need for need in found if not need.marker or need.marker.evaluate({"extra": extra})
            ]
    return names


@cache
def _top_files(name: str) -> list[Path]:
    """The files and folders of a distribution in the folder of installed packages."""
    distribution = metadata.distribution(name)
    tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
    return [Path(str(distribution.locate_file(top))) for top in sorted(tops)]


_DRIVER = """
import contextlib, importlib, io, json, os, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    request, failure, printed = json.loads(line), "", io.StringIO()
    importlib.invalidate_caches()
    if "command" in request:
        for module in request["preloaded"]:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        child = os.fork()
        if child == 0:
            for stream, path in enumerate([os.devnull, request["log"], request["log"]]):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), stream)
            sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
            os.environ.update(request["variables"])
            sys.argv = request["command"]
            from visavis.cli import main
            main()
            sys.exit()
        if request["waits"]:
            failure = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            failure = child
    else:
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(request["code"], "block", "exec"), names)
        except BaseException:
            failure = traceback.format_exc()
    sys.stdout.write(json.dumps([printed.getvalue(), failure]) + "\\n")
    sys.stdout.flush()
"""
_PRELOADED = (
    "torch",
    "scipy.stats",
    "PIL.PngImagePlugin",
    "safetensors.torch",
    "visavis.cli.printers",
    "visavis.training.training_run",
    "visavis.research.experiments",
    "transformers.models.clip.modeling_clip",
)
"""Modules that almost every command imports. A command starts from a process that has them."""


class Session:
    """A process of an installation that runs Python blocks one after the other, as a notebook does,
    or starts commands.
    """

    def __init__(self, installation: Installation, folder: Path, environment: dict[str, str]):
        self.log = installation.bin / "log.txt"
        self.process = subprocess.Popen(
            [installation.bin / "python", "-c", _DRIVER],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _send(self, **request: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run_code(self, code: str) -> str:
        """Run code and return what it prints."""
        printed, failure = self._send(code=code)
        assert not failure, failure
        return printed

    def start_command(self, command: str, *arguments: str, waits: bool = True) -> int:
        """Start a command of visavis, which may begin with variables. Its output goes to ``log``.

        Returns the exit code, or the number of the process if it does not wait.
        """
        self.log.unlink(missing_ok=True)
        self.log.touch()
        # shlex does not join continued lines.
        joined = command.replace("\\\n", " ")
        words = [*shlex.split(joined, comments=True), *arguments]
        start = words.index("visavis")
        variables = dict(word.split("=", 1) for word in words[:start])
        _, number = self._send(
            command=words[start:],
            variables=variables,
            preloaded=_PRELOADED,
            log=str(self.log),
            waits=waits,
        )
        return number

    def run_command(self, command: str, *, fails: bool = False) -> str:
        """Run a command of visavis, which fails or not, and return what it prints."""
        code = self.start_command(command)
        printed = self.log.read_text(encoding="utf-8")
        assert bool(code) == fails, f"$ {command}\n{printed}"
        return printed

    def close(self) -> None:
        """End the process."""
        self.process.communicate()
