"""Formulas of docstrings and pages: their translation to LaTeX and MathML, and their place."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("math_core", reason="math-core is not installed: pip install 'visavis[docs]'")
markdown = pytest.importorskip("markdown", reason="mkdocs is not installed")

PROJECT = Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("formulas", PROJECT / "tools" / "formulas.py")
formulas = importlib.util.module_from_spec(_SPEC)
sys.modules["formulas"] = formulas
_SPEC.loader.exec_module(formulas)


@cache
def docstrings(folder):
    """Docstrings below a folder of the project by place, from files that may have formulas."""
    found = {}
    for path in sorted((PROJECT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "$" in text or "Formula:" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    place = f"{path.name}: {getattr(node, 'name', 'module')}"
                    found[place] = f"{found.get(place, '')}\n\n{ast.get_docstring(node) or ''}"
    return found


def prose(page):
    """The text of a page without blocks of code."""
    return re.sub(
        r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


def every_formula():
    from visavis.evaluation.metrics import CATALOG

    texts = [*docstrings("src").values(), *docstrings("studies/findings").values()]
    texts += [prose(page) for page in sorted((PROJECT / "docs").rglob("*.md"))]
    texts += [metric.formula for metric in CATALOG]
    return sorted(
        {
            " ".join(match["formula"].split())
            for text in texts
            for match in re.finditer(formulas.FORMULA, text)
        }
    )


def test_every_formula_becomes_mathml_with_the_same_names():
    found = every_formula()
    assert len(found) > 250
    for formula in found:
        html = formulas.to_html(formula)
        math = ET.fromstring(re.search("<math.*</math>", html)[0].replace("&ApplyFunction;", ""))
        shown = "".join(math.itertext())
        names = set(re.findall(r"[A-Za-z]{3,}(?:_[A-Za-z]{3,})*", formula))
        names -= {*formulas.GREEK, "sum", "sqrt", "floor", "infinity", "argmin", "argmax"}
        assert all(name in shown for name in names if not re.search(r"\bd\w*/d", name)), formula
        is_fraction = math.find(".//mfrac") is not None or "/" in shown
        assert is_fraction == ("/" in formula), formula
        assert len(math.findall(".//mo")) >= formula.count("<=") + formula.count("!="), formula


# Compared by hand with the equations of the papers.
LATEX = {
    "sum_p [margin + max_j s_ij - s_ip]_+": r"\sum_{p} [ \mathrm{margin} + \max_{j} s_{ij} - s_{ip} ]_{+}",
    "(1 / gamma) sum_p log(1 + sum_j e^(gamma (s_ij - s_ip + margin)))": r"\frac{1}{\gamma} \sum_{p} "
    r"\log\left( 1 + \sum_{j} e^{\gamma ( s_{ij} - s_{ip} + \mathrm{margin} )} \right)",
    "-(1 / |P_i|) sum_{p in P_i} log(e^(s_ip / tau) / (sum_j e^(s_ij / tau)))": r"- \frac{1}{\lvert P_{i} \rvert} "
    r"\sum_{p \in P_{i}} \log\left( \frac{e^{s_{ip} / \tau}}{\sum_{j} e^{s_{ij} / \tau}} \right)",
    "w_i = beta - (o_i0 - max_j s_ij) / alpha": r"w_{i} = \beta - \frac{o_{i0} - \max_{j} s_{ij}}{\alpha}",
    "R(i) = 1 + sum_{j != i} sigmoid((s_j - s_i) / tau)": r"R( i ) = 1 + \sum_{j \ne i} "
    r"\operatorname{sigmoid}\left( \frac{s_{j} - s_{i}}{\tau} \right)",
    "dL/ds_ij = -z_ij scale / (1 + e^(z_ij (scale s_ij + bias)))": r"\partial L / \partial s_{ij} = - "
    r"\frac{z_{ij} \, \mathrm{scale}}{1 + e^{z_{ij} ( \mathrm{scale} \, s_{ij} + \mathrm{bias} )}}",
    "S = (sum_e p_e w_e <v_e, t_e>) / (sum_e p_e w_e)": r"S = \frac{\sum_{e} p_{e} w_{e} "
    r"\langle v_{e} , t_{e} \rangle}{\sum_{e} p_{e} w_{e}}",
    "(log sum_q exp(k r_q)) / k": r"\frac{\log \sum_{q} \exp( k r_{q} )}{k}",
    "|g_ij| ||P_{t_j} v_i||": r"\lvert g_{ij} \rvert \lVert P_{t_{j}} v_{i} \rVert",
    "[G(s^ - s_ii) + m]_+": r"[ G( \hat{s} - s_{ii} ) + m ]_{+}",
    "s+ - s- < alpha": r"s^{+} - s^{-} < \alpha",
    "R = theta(V) phi(V)^T / N": r"R = \frac{\theta( V ) \phi( V )^{\top}}{N}",
    "(sum_j w_j)^2 / (sum_j w_j^2)": r"\frac{\left( \sum_{j} w_{j} \right)^{2}}{\sum_{j} w_{j}^{2}}",
    "sin(pi y - pi / 2) / 2 + 1 / 2": r"\frac{\sin\left( \pi y - \frac{\pi}{2} \right)}{2} + \frac{1}{2}",
    "mean(#{rank_j <= R} / R)": r"\operatorname*{mean}\left( \frac{\#\{ \mathrm{rank}_{j} \le R \}}{R} \right)",
    "T_con a_l + offline_margin": r"T_{\mathrm{con}} a_{l} + \mathrm{offline\_margin}",
    "F'(x) (a / b) c": r"F'( x ) \frac{a}{b} c",
    "f(a / b) (a / b)^2": r"f\left( \frac{a}{b} \right) \left( \frac{a}{b} \right)^{2}",
    "(a / b - c) d": r"\left( \frac{a}{b} - c \right) d",
    "((a / b) / c)": r"\frac{\frac{a}{b}}{c}",
}


@pytest.mark.parametrize("formula", LATEX)
def test_formula_becomes_latex(formula):
    assert formulas.to_latex(formula) == LATEX[formula]


@pytest.mark.parametrize(
    "formula",
    [
        # Two readings, because the end of a denominator or of an argument is open.
        *("a / b c", "a / b / c", "log x / y", "sum_k x / sum_k y", "e^(a / b c)"),
        # Missing parts and brackets.
        *("", "a +", "(a", "a)", "[a)", "sum_{j b", "|a", "/ b", "a =", "x_", "x ^", "a, , b"),
        # A product without a space, or a name with an index.
        *("xy + 2", "max_row x", "alpha_row x", "a +b", "foo_x_y", "2^ab"),
        *("a ~ b", "\\frac{a}{b}", "a & b", "a b_"),
    ],
)
def test_formula_with_an_error_or_two_readings_is_rejected(formula):
    with pytest.raises(formulas.FormulaError):
        formulas.to_html(formula)


def test_page_shows_formulas_and_keeps_code():
    page = markdown.Markdown(extensions=["tables", formulas.FormulaExtension()])
    text = "Take $s_ij$, `$P$` and `s_ij`, `$HOME`. Then $sum_p [margin + max_j s_ij\n- s_ip]_+$, and\n\n|a|b|\n|-|-|\n|`$x^2$`|c_d_e|"
    html = page.convert(text)
    assert "<msub><mi>s</mi><mrow><mi>i</mi><mi>j</mi></mrow></msub>" in html
    assert html.count("<math") == 4
    assert "<code>s_ij</code>, <code>$HOME</code>." in html
    assert "</math>,</span> and" in html
    assert "<td>c_d_e</td>" in html
    assert "<msup><mi>x</mi><mn>2</mn></msup></math></td>" in html


def test_formula_sections_have_no_formula_outside_dollars():
    """Such a section may name parameters and shapes as code."""
    sections = [
        (place, section[1])
        for place, text in docstrings("src").items()
        for section in re.finditer(
            r"^Formula:(.*?)(?=\n\n\w[\w ]*:\n|\Z)", text, re.MULTILINE | re.DOTALL
        )
    ]
    assert len(sections) > 35
    code = re.compile(r"``(?:[\w.]+(?:=[\w\".-]+)?|\w+\[[\w-]+\]|\[[\w, ]+\])``")
    bare = re.compile(r"``|\$|\b[A-Za-z]_\w{1,2}\b|\^|[<>]=|\b(?:sum|max|min|mean)_|dL/d| [*/=] ")
    left = [
        (place, rest[0])
        for place, text in sections
        if (rest := bare.search(code.sub("", re.sub(formulas.FORMULA, "", text))))
    ]
    assert left == []
