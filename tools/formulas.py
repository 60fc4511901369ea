"""Formulas of docstrings and pages as MathML, made when the site is built. A hook of mkdocs, see
mkdocs.yml.

A formula is written between dollars, in a plain form that reads well in a terminal::

    $sum_p [margin + max_j s_ij - s_ip]_+$

Pages in docs also mark it as code, because other viewers would read it as LaTeX. The form:

- A space is a product: ``2 B (B - 1)``. ``f(x)`` without a space applies f.
- Scripts: ``s_ij``, ``sum_{i in P}``, ``e^(gamma m)``, ``X^T`` (transposed), ``[x]_+``, ``s^`` (with
  a hat), ``v+`` and ``v-``.
- Greek letters are written by name, ``lam`` is lambda. Other words of three letters are names.
- A fraction: ``a b / c``, ``a / (b c)``. Its numerator begins after a sum, a maximum or a sign.
- ``|x|``, ``||x||``, ``<x, y>``, ``#{x > y}`` (a count), ``x * y`` (of each element), ``x . y``,
  ``dL/ds_ij`` (a derivative).

Other formulas, and formulas with two readings, fail the build.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple
from xml.etree import ElementTree as ET

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from math_core import LatexError, LatexToMathML
from mkdocs.config.defaults import MkDocsConfig

LONGEST_INLINE = 24
"""Letters, digits and signs of a formula that fit between words on a phone. A longer one is on a
line of its own, which scrolls.
"""
GREEK = {
    name: rf"\{name}"
    for name in [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "theta",
        "mu",
        "pi",
        "phi",
        "rho",
        "sigma",
        "tau",
    ]
}
GREEK |= {"epsilon": r"\varepsilon", "lam": r"\lambda"}
WITH_LIMITS = {name: rf"\{name}" for name in ("sum", "max", "min")}
WITH_LIMITS |= {
    "mean": r"\operatorname*{mean}",
    "argmin": r"\operatorname*{arg\,min}",
    "argmax": r"\operatorname*{arg\,max}",
}
FUNCTIONS = {name: rf"\{name}" for name in ("log", "exp", "cos", "sin", "tanh")}
LETTERS = GREEK | FUNCTIONS | {"infinity": r"\infty", "BN": r"\operatorname{BN}"}
ENCLOSED = {
    "sqrt": (r"\sqrt{", "}"),
    "floor": (r"\left\lfloor ", r" \right\rfloor"),
}
SIGNS = {sign: sign for sign in "=<>+-,:"} | {
    "<=": r"\le",
    ">=": r"\ge",
    "!=": r"\ne",
    "->": r"\to",
    "<-": r"\gets",
    "in": r"\in",
    "*": r"\odot",
    ".": r"\cdot",
}
BRACKETS = {
    "(": (")", "(", ")"),
    "[": ("]", "[", "]"),
    "{": ("}", "{", "}"),
    "#{": ("}", r"\{", r"\}"),
    "|": ("|", r"\lvert", r"\rvert"),
    "||": ("||", r"\lVert", r"\rVert"),
    "<": (">", r"\langle", r"\rangle"),
}
FORMULA = r"(?P<code>`*)\$(?P<formula>(?![\s$])[^$`]+(?<!\s))\$(?P=code)(?P<mark>[.,:]?)"
"""A formula between dollars, also marked as code."""
CONVERTER = LatexToMathML(fancy_error=False)
TOKEN = re.compile(
    r"""
      (?P<derivative>d(?P<of>[A-Za-z](?:_\w+)?)/d(?P<by>[A-Za-z](?:_\w+)?))
    | (?P<number>\d+(?:\.\d+)?)
    | (?P<hat>[A-Za-z]\^(?=[\s_,)\]]|$))
    | (?P<word>[A-Za-z]{3,}(?:_[A-Za-z]{3,})+|[A-Z]+@(?:\d+|K)|[A-Za-z]+)
    | (?P<index>_(?:[A-Za-z0-9]+|\+))
    | (?P<caret>[_^](?=[({]|\w))
    | (?P<raised>(?<=[A-Za-z])[-+*](?=[\s,)}\]]|$))
    | (?P<sign>\.\.\.|<=|>=|!=|->|<-|\#\{|\|\||[-+*/=<>.,:'|(){}\[\]])
    """,
    re.VERBOSE,
)


class FormulaError(ValueError):
    """A formula that is not in the plain form, or that has two readings."""


class Token(NamedTuple):
    """A part of a formula, and whether white space or an end is before and after it."""

    kind: str
    text: str
    start: int
    space_before: bool
    space_after: bool


class Factor(NamedTuple):
    """A factor as LaTeX, also without its parentheses, and whether it needs space around it."""

    tex: str
    bare: str
    is_name: bool = False


def to_latex(formula: str) -> str:
    """Translate a formula to LaTeX.

    Args:
        formula: The plain form, without dollars.

    Returns:
        LaTeX.

    Raises:
        FormulaError: If it is not in the plain form, or has two readings.
    """
    reader = Reader(formula)
    tex = reader.expression()
    if reader.next.kind != "end":
        raise reader.error("expected the end")
    return tex


def tokens_of(formula: str) -> Iterable[Token]:
    """The tokens of a formula, then one of kind "end"."""
    start = 0
    while start < len(formula):
        match = TOKEN.match(formula, start)
        if match is None:
            raise FormulaError(f"{formula}: expected a formula, got {formula[start:]!r}.")
        kind = match.lastgroup or ""
        end = match.end()
        before = formula[:start]
        after = formula[end:]
        yield Token(kind, match[0], start, before[-1:] in ("", " "), after[:1] in ("", " "))
        start = end + len(after) - len(after.lstrip())
    yield Token("end", "", start, True, True)


class Reader:
    """Reads a formula from left to right."""

    def __init__(self, formula: str) -> None:
        self.formula = " ".join(formula.split())
        self.tokens = list(tokens_of(self.formula))
        self.position = 0
        self.closing = [""]
        self.in_script = False

    @property
    def next(self) -> Token:
        return self.tokens[self.position]

    def take(self) -> str:
        self.position += 1
        return self.tokens[self.position - 1].text

    def error(self, problem: str) -> FormulaError:
        return FormulaError(f"{self.formula}: {problem}, got {self.formula[self.next.start :]!r}.")

    def expression(self) -> str:
        """Terms with signs between them, up to the closing bracket."""
        parts: list[str] = []
        needs_term = True
        while self.next.text != self.closing[-1]:
            token = self.next
            if token.text not in SIGNS or self.opens():
                if not needs_term:
                    raise self.error("expected a sign")
                parts.append(self.term())
                needs_term = False
                continue
            if needs_term and token.text != "-":
                raise self.error("expected a term")
            if (
                not needs_term
                and token.space_before != token.space_after
                and token.text not in ",:"
            ):
                raise self.error("expected a space on both sides of a sign")
            parts.append(SIGNS[self.take()])
            needs_term = True
        if needs_term:
            raise self.error("expected a term")
        return " ".join(parts)

    def opens(self) -> bool:
        """Whether a bracket opens here."""
        token = self.next
        return (
            token.text in BRACKETS
            and token.text != self.closing[-1]
            and not (token.text == "<" and token.space_after)
        )

    def starts_factor(self) -> bool:
        token = self.next
        is_letter = token.kind in ("derivative", "number", "hat", "word") and token.text != "in"
        return is_letter or token.text == "..." or self.opens()

    def term(self) -> str:
        """A product, with sums and fractions."""
        done: list[Factor] = []
        factors: list[Factor] = []
        is_function_open = False
        while self.starts_factor() or self.next.text == "/":
            text = self.next.text
            if text in WITH_LIMITS and not self.is_applied():
                tex = self.scripts(WITH_LIMITS[self.take()])
                done += [*factors, Factor(tex, tex)]
                factors = []
            elif text == "/":
                if not factors or is_function_open:
                    raise self.error("expected parentheses around the numerator")
                done.append(self.fraction(factors))
                factors = []
                if self.next.text == "/" or (
                    self.starts_factor() and self.next.text not in WITH_LIMITS
                ):
                    raise self.error("expected parentheses around the fraction or its denominator")
            else:
                is_function_open |= text in FUNCTIONS and not self.is_applied()
                factors.append(self.factor())
        if not [*done, *factors]:
            raise self.error("expected a term")
        return product([*done, *factors])

    def fraction(self, numerator: list[Factor]) -> Factor:
        self.take()
        is_operator = self.next.text in WITH_LIMITS and not self.is_applied()
        if is_operator or not self.starts_factor():
            raise self.error("expected parentheses around the denominator")
        denominator = self.factor()
        if self.in_script:
            tex = f"{product(numerator)} / {denominator.tex}"
        else:
            above = numerator[0].bare if len(numerator) == 1 else product(numerator)
            tex = rf"\frac{{{above}}}{{{denominator.bare}}}"
        return Factor(tex, tex)

    def factor(self) -> Factor:
        """A number, a name, a function of its arguments or an expression in brackets."""
        if self.opens():
            return self.group()
        token = self.next
        applied = self.is_applied()
        self.take()
        text = token.text
        if token.kind == "derivative":
            match = TOKEN.match(text)
            assert match is not None
            of, by = (
                match[part][0] + (index_of(match[part][1:]) if match[part][1:] else "")
                for part in ("of", "by")
            )
            tex = rf"\partial {of} / \partial {by}"
            return Factor(tex, tex, is_name=True)
        if text in ENCLOSED and applied:
            left, right = ENCLOSED[text]
            tex = self.scripts(left + self.group().bare + right)
            return Factor(tex, tex)
        is_name = False
        if token.kind == "hat":
            tex = rf"\hat{{{text[0]}}}"
        elif text == "...":
            tex = r"\dots"
        elif text in LETTERS or text in WITH_LIMITS:
            tex = (LETTERS | WITH_LIMITS)[text]
        elif token.kind == "number" or len(text) == 1:
            tex = text
        else:
            tex = self.upright(text, applied)
            is_name = not applied
        tex = self.scripts(tex)
        if applied:
            # A function keeps its parentheses, and what follows them belongs to the whole.
            tex = f"{tex}{self.group(keep=True).tex}"
        return Factor(tex, tex, is_name)

    def upright(self, name: str, applied: bool) -> str:
        first = name.split("_", maxsplit=1)[0]
        if len(name) == 2 or (first != name and first in LETTERS | WITH_LIMITS):
            self.position -= 1
            raise self.error("expected a product with a space, or an index in braces")
        command = "operatorname" if applied else "mathrm"
        return rf"\{command}{{{name}}}".replace("_", r"\_")

    def is_applied(self) -> bool:
        """Whether arguments follow this word and its indices without a space."""
        after = self.position + 1
        while self.tokens[after].kind == "index" or self.tokens[after].text == "'":
            after += 1
        token = self.tokens[after]
        return token.text == "(" and not token.space_before

    def group(self, keep: bool = False, is_script: bool = False) -> Factor:
        """An expression in brackets. Those around a fraction are dropped, unless they are kept."""
        opening = self.take()
        closing, left, right = BRACKETS[opening]
        self.closing.append(closing)
        inner = self.expression()
        self.closing.pop()
        self.take()
        if opening in "([{#{" and re.search(r"\\(frac|sum|left)", inner) and not self.in_script:
            left = rf"\left{left}"
            right = rf"\right{right}"
        tex = f"{left} {inner} {right}"
        if opening == "#{":
            tex = rf"\#{tex}"
        if is_script:
            return Factor(tex, inner)
        scripted = self.scripts(tex)
        if scripted != tex or opening != "(":
            return Factor(scripted, scripted)
        return Factor(inner if is_fraction(inner) and not keep else tex, inner)

    def scripts(self, tex: str) -> str:
        """Add the indices and exponents that follow directly."""
        while not self.next.space_before:
            if self.next.kind == "index":
                tex += index_of(self.take())
            elif self.next.kind == "raised":
                tex += f"^{{{self.take()}}}"
            elif self.next.text == "'":
                tex += self.take()
            elif self.next.kind == "caret":
                tex += f"{self.take()}{{{self.script()}}}"
            else:
                break
        return tex

    def script(self) -> str:
        """What follows a caret or an underscore: brackets, a number or a letter."""
        outer = self.in_script
        self.in_script = True
        if self.opens():
            tex = self.group(is_script=True).bare
        elif self.next.text == "T":
            self.take()
            tex = r"\top"
        elif self.next.kind == "number" or len(self.next.text) == 1 or self.next.text in GREEK:
            text = self.take()
            tex = GREEK.get(text, text)
        else:
            raise self.error("expected parentheses around the exponent")
        self.in_script = outer
        return tex


def is_fraction(tex: str) -> bool:
    """Whether LaTeX is one fraction and nothing else."""
    if not tex.startswith(r"\frac{"):
        return False
    depth, groups = 0, 0
    for position, character in enumerate(tex):
        depth += {"{": 1, "}": -1}.get(character, 0) if tex[position - 1] != "\\" else 0
        groups += depth == 0 and character == "}"
        if groups == 2:
            return position == len(tex) - 1
    return False


def index_of(text: str) -> str:
    """An index of letters and digits. Three letters in a row are a name."""
    index = text.removeprefix("_")
    if index in GREEK:
        return f"_{{{GREEK[index]}}}"
    return rf"_{{\mathrm{{{index}}}}}" if re.search("[A-Za-z]{3}", index) else f"_{{{index}}}"


def product(factors: list[Factor]) -> str:
    """Factors side by side, with space around names."""
    tex = factors[0].tex
    for before, factor in pairwise(factors):
        tex += (r" \, " if before.is_name or factor.is_name else " ") + factor.tex
    return tex


def to_html(formula: str, mark: str = "") -> str:
    """Translate a formula to MathML, on a line of its own if it is long.

    Args:
        formula: The plain form, without dollars.
        mark: Punctuation after the formula, which stays on its line.

    Returns:
        HTML.

    Raises:
        FormulaError: If it is not in the plain form, or has two readings.
    """
    is_long = len(re.sub(r"[\s_^(){}]", "", formula)) > LONGEST_INLINE
    latex = to_latex(formula)
    try:
        mathml = CONVERTER.convert_with_local_state(
            latex, displaystyle=is_long or r"\frac" in latex
        )
    except LatexError as error:
        raise FormulaError(f"{formula}: {error}") from error
    mathml = mathml.replace('display="block"', 'displaystyle="true"')
    return f'<span class="formula" tabindex="0">{mathml}{mark}</span>' if is_long else mathml + mark


class FormulaProcessor(InlineProcessor):
    """Replaces formulas between dollars, also in code marks. An error is a warning of the build."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str | ET.Element, int, int]:
        try:
            html = to_html(m["formula"], m["mark"])
        except FormulaError as error:
            logging.getLogger("mkdocs.formulas").warning("formula %s", error)
            html = ""
        return self.md.htmlStash.store(html), m.start(0), m.end(0)


class FormulaExtension(Extension):
    """Markdown with formulas."""

    def extendMarkdown(self, md: Markdown) -> None:
        # Before code and escapes, which have 190 and 180.
        md.inlinePatterns.register(FormulaProcessor(FORMULA, md), "formula", 195)


def on_config(config: MkDocsConfig) -> None:
    """Add the extension to pages, and to docstrings, which are converted with the same ones."""
    config.markdown_extensions.append(FormulaExtension())
