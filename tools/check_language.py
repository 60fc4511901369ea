"""Check the wording of docs, docstrings, comments, messages and names: python
tools/check_language.py [PATH ...] [--figures].

Reads Markdown, Python, TOML, YAML, Makefile, shell, HTML, Jinja, JavaScript and CSS. Prints the
file, the line, the word and its replacement. Exits with 1 if there is a finding, or if the docs
miss a target. ``--figures`` prints figures of the docs: words per sentence, and semicolons and
replaced words per 1,000 words. A quotation that must stay is put in backticks, or its line ends in
``language: quoted``.
"""

from __future__ import annotations

import argparse
import ast
import html
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
CODE = ("src", "tests", "tools", "studies", "benchmarks", "examples")
PROSE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs")
SETTINGS = ("Makefile", "pyproject.toml", "mkdocs.yml", ".pre-commit-config.yaml", ".github", ".ci")
EXEMPT = (
    "docs/papers/errata.md",
    "docs/evidence/",
    "tools/check_language.py",
    "tests/test_language.py",
)
"""Errata quote papers. This check and its test list the words themselves."""

WORDS = {
    r"told|tells?|said|says?": "given, reports, prints, returns",
    r"anew": "again, re-",
    r"beside": "next to, compared with",
    r"(?:goes|gone|go|going) on(?! (?:to|in)\b)": "continues, resumes",
    r"so many": "n, the given number",
    r"at hand": "available",
    r"by lot": "at random",
    r"drawn (?:worlds?|scenes?|clips?)": "synthetic scenes",
    r"moving scenes?": "synthetic clips",
    r"pictures?": "images",
    r"words from scratch": "word embeddings trained from scratch",
    r"first numbers": "Matryoshka dimensions",
    r"degrees? of relevance": "graded relevance, relevance values",
    r"judgements?": "judgments",
    r"misplaced": "mismatched, noise_ratio",
    r"handed on": "carried over",
    r"right answers?": "ground truth, positives",
    r"(?:models?|one) that attends?": "cross-attention or late-interaction model",
    r"(?<!text[ -])towers?(?!:)": "text tower, encoder",
    r"vital numbers": "health metrics",
    r"hung up": "timed out, disconnected",
    r"rules of the house": "project rules",
    r"to be had": "available from",
    r"mend(?:s|ed|ing)?": "fix",
    r"whoever": "a user who",
    r"(?<=[.:,] )(?:that|those) of|^(?:that|those) of|(?<=: )what (?:is|was|will|to|a|the)": "the subject of the clause",
    r"(?<!there )(?<!There )(?:is|are|was|were) no "
    r"(?!longer\b|more than\b|fewer than\b|less than\b|later than\b|larger than\b|greater "
    r"than\b|faster\b|slower\b|worse\b|better\b)"
    r"\w+": "is not a",
    r"of today": "current",
    r"behaviours?|colours?|normalis\w+|generalis\w+|optimis\w+": "American spelling",
}
NAMES = {
    "tell": "warn, print_message", "told": "the value's name", "said": "the value's name", "say": "warn", "heard": "install_signal_handlers",
    "degrees": "relevance", "judgements": "feedback", "judged": "feedback", "judgement": "judgment", "picture": "image",
    "pictures": "images", "forth": "image_to_text", "back": "text_to_image", "across": "gather_targets", "Desk": "SearchService", "Gate": "TokenAuth",
    "Guard": "SecurityMiddleware", "Allowances": "RateLimiter", "Where": "ItemFilter", "looks": "perceptual_hash", "bits_apart": "hamming_distance",
    "anew": "again", "wanted": "the value's name", "Portrait": "ObjectiveProfile", "Turned": "Rotation", "Outlook": "Extrapolation", "Shades": "ThemedImage",
    "Concern": "Issue", "misplaced": "noise_ratio", "mend": "fix", "misdirected": "false_negative_share", "first_found": "hubness", "vital": "health",
}  # fmt: skip
"""Identifiers, or parts of them between underscores, with their replacement."""

TARGETS = {"median sentence": 14, "90th percentile": 26, "semicolons": 1.0, "replaced words": 0.0}
MAX_TEST_NAME = 60

_WORDS = [
    (re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), advice) for pattern, advice in WORDS.items()
]


class Finding(NamedTuple):
    path: Path
    line: int
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(PROJECT)}:{self.line}: {self.text!r}: use {self.advice}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, help="Files or folders to check. Default: the whole project."
    )
    parser.add_argument(
        "--figures", action="store_true", help="Print the figures of the docs, too."
    )
    options = parser.parse_args()
    roots = [path.resolve() for path in options.paths] or [
        PROJECT / name for name in (*CODE, *PROSE, *SETTINGS)
    ]
    files = sorted(
        {file for root in roots for file in ([root] if root.is_file() else root.rglob("*"))}
    )
    files = [file for file in files if kind(file) in READERS and not is_exempt(file)]
    findings = [finding for file in files for finding in check(file)]
    for finding in findings:
        print(finding)
    figures = docs_figures([file for file in files if file.suffix == ".md"])
    missed = [
        f"{name} {value:.1f}, at most {TARGETS[name]}"
        for name, value in figures.items()
        if value > TARGETS[name]
    ]
    if options.figures or (missed and not options.paths):
        print(", ".join(f"{name}: {value:.1f}" for name, value in figures.items()))
    if missed and not options.paths:
        print(f"The docs miss: {', '.join(missed)}.")
    return bool(findings or (missed and not options.paths))


def is_exempt(path: Path) -> bool:
    name = path.relative_to(PROJECT).as_posix()
    return any(name.startswith(prefix) for prefix in EXEMPT)


def kind(path: Path) -> str:
    """The suffix of a file, or its name if it has no suffix."""
    return path.suffix or path.name


def check(path: Path) -> Iterator[Finding]:
    """Findings in one file."""
    text = path.read_text(encoding="utf-8")
    quoted = {
        number for number, line in enumerate(text.split("\n"), 1) if "language: quoted" in line
    }
    for line, piece in READERS[kind(path)](text):
        yield from (
            finding for finding in check_prose(path, line, piece) if finding.line not in quoted
        )
    if path.suffix == ".py":
        yield from (finding for finding in check_names(path, text) if finding.line not in quoted)


def check_prose(path: Path, first_line: int, text: str) -> Iterator[Finding]:
    for offset, line in enumerate(text.split("\n")):
        plain = without_code(line)
        for pattern, advice in _WORDS:
            for match in pattern.finditer(plain):
                yield Finding(path, first_line + offset, match[0], advice)
        if (
            re.search(r"[a-z)] ?;( (?!\w+=)|$)", plain)
            and "://" not in plain
            and not re.search(r"\bimport |\b(?:const|return) |\);$", plain)
        ):
            yield Finding(path, first_line + offset, ";", "two sentences")


def without_code(text: str) -> str:
    """The text without code, addresses and the names of HTML tags."""
    return re.sub(r"``[^`]*``|`[^`]*`|\{[^{}]*\}|https?://\S+|</?[a-z]+\b", " x ", text)


def prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside code blocks."""
    fence = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fence = not fence
        elif not fence:
            yield number, line


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings without their examples, comments, and strings with spaces."""
    tree = ast.parse(text)
    skipped = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            value = "".join(
                part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            value = re.sub(r"^ *(>>>|\.\.\. ).*$", "", node.value, flags=re.MULTILINE)
        else:
            continue
        if " " in value.strip():
            yield node.lineno, value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def prose_of_yaml(text: str) -> Iterator[tuple[int, str]]:
    """All lines, since most texts of YAML have no quotation marks."""
    yield from enumerate(text.split("\n"), 1)


QUOTED = r"""\"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
STRINGS = re.compile(QUOTED)
HASH_COMMENTS = re.compile(rf'''"""[\s\S]*?"""|{QUOTED}|\#.*''')
SLASH_COMMENTS = re.compile(rf"{QUOTED}|`(?:\\.|[^`\\])*`|//.*|/\*[\s\S]*?\*/")
MARKUP = re.compile(
    r"<script[\s\S]*?</script>|<style[\s\S]*?</style>|<!--|-->|\{#|#\}|\{%[\s\S]*?%\}|\{\{[\s\S]*?\}\}|<[a-zA-Z/!][^>]*>"
)


def prose_of_comments_and_strings(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    """The comments, and the strings that contain a space: the matches of the pattern, without their
    marks.
    """
    for match in pattern.finditer(text):
        if " " in match[0]:
            yield 1 + text.count("\n", 0, match.start()), match[0].strip("\"'`#/*")


def prose_of_markup(text: str) -> Iterator[tuple[int, str]]:
    """The text between tags, comments, and the strings in tags and template expressions. Styles are
    omitted.
    """
    for match in MARKUP.finditer(text):
        pattern = SLASH_COMMENTS if match[0].startswith(("<script", "<style")) else STRINGS
        content = re.sub(rf"\bstyle=(?:{QUOTED})", "", match[0])
        first_line = text.count("\n", 0, match.start())
        for line, piece in prose_of_comments_and_strings(pattern, content):
            yield first_line + line, piece
    plain = MARKUP.sub(lambda match: " x " + "\n" * match[0].count("\n"), text)
    yield from enumerate(html.unescape(plain).split("\n"), 1)


prose_with_hash_comments = partial(prose_of_comments_and_strings, HASH_COMMENTS)
prose_with_slash_comments = partial(prose_of_comments_and_strings, SLASH_COMMENTS)
READERS: dict[str, Callable[[str], Iterator[tuple[int, str]]]] = {
    ".md": prose_of_markdown,
    ".py": prose_of_python,
    ".toml": prose_with_hash_comments,
    "Makefile": prose_with_hash_comments,
    # .ci/run is a shell script.
    "run": prose_with_hash_comments,
    ".yml": prose_of_yaml,
    ".yaml": prose_of_yaml,
    ".html": prose_of_markup,
    ".j2": prose_of_markup,
    ".js": prose_with_slash_comments,
    ".css": prose_with_slash_comments,
}
"""Reader of each kind of file: yields line numbers and pieces of prose."""


def check_names(path: Path, text: str) -> Iterator[Finding]:
    """Names that a file defines, and the length of test names."""
    tree = ast.parse(text)
    names = [(1, path.stem)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append((node.lineno, node.name))
            if node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME:
                yield Finding(path, node.lineno, node.name, f"at most {MAX_TEST_NAME} characters")
        elif isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id if isinstance(node, ast.Name) else node.attr))
    for line, name in names:
        for part in {name, *name.split("_")}:
            if part in NAMES:
                yield Finding(path, line, name, NAMES[part])


def docs_figures(pages: list[Path]) -> dict[str, float]:
    """Figures of the prose of all pages together: headings, tables, code and links' addresses
    removed.
    """
    prose = "\n\n".join(paragraphs(page.read_text(encoding="utf-8")) for page in pages)
    words = len(re.findall(r"[A-Za-z][\w'’-]*", prose))
    if not words:
        return {}
    lengths = [
        len(re.findall(r"[\w'’.-]*\w", sentence))
        for sentence in re.split(r"(?<=[.!?:])\s+|\n\n", prose)
    ]
    lengths = [length for length in lengths if length > 1]
    replaced = sum(len(pattern.findall(prose)) for pattern, _ in _WORDS)
    return {
        "median sentence": statistics.median(lengths),
        "90th percentile": statistics.quantiles(lengths, n=10)[-1],
        "semicolons": 1000 * prose.count(";") / words,
        "replaced words": 1000 * replaced / words,
    }


def paragraphs(text: str) -> str:
    """The sentences of a page; an item of a list is a paragraph of its own."""
    lines = [line for _, line in prose_of_markdown(text)]
    lines = [
        re.sub(r"^(\s*)([-*]|\d+\.)\s+", "\n\n", line)
        for line in lines
        if not line.lstrip().startswith(("|", "#", "!["))
    ]
    return re.sub(r"\]\([^)]*\)", "]", without_code("\n".join(lines)))


if __name__ == "__main__":
    sys.exit(main())
