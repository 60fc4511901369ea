"""The documentation site: it builds without warnings, requests nothing from other hosts, and is
readable and searchable in a browser.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
SAMPLE = ["index.html", "guides/serve.html", "reference/catalogs/protocols.html"]
LAYOUTS = [("light", 1200), ("dark", 1200), ("light", 360), ("dark", 360)]
pytestmark = pytest.mark.site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'visavis[docs]'")
    folder = tmp_path_factory.mktemp("docs") / "site"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


class Resources(HTMLParser):
    """Addresses of everything that a page loads."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "src" in attributes:
            self.addresses.append(attributes["src"])
        if tag == "link" and attributes.get("rel") != "canonical":
            self.addresses.append(attributes["href"])


def test_site_requests_nothing_external(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    external = re.compile(r"(?:https?:)?//")
    assert [
        (page.name, url)
        for page in pages
        for url in Resources(page.read_text()).addresses
        if external.match(url)
    ] == []
    assert [
        path.name
        for path in site.rglob("*.css")
        if re.search(r"(?:url\(|@import )['\"]?(?:https?:)?//", path.read_text())
    ] == []


def test_site_has_no_tags_from_placeholders_of_docstrings(site):
    """A docstring with ``<n>`` outside code would open a tag that is never closed."""
    placeholder = re.compile(
        r"<(?:[A-Z]+|n|k|name|paper|table-|recipe|row|run|step|id)(?=[->])[^>]*>"
    )
    assert [
        (path.name, tag[0])
        for path in sorted(site.rglob("*.html"))
        for tag in placeholder.finditer(path.read_text())
    ] == []


def test_site_has_reference_of_every_objective_and_command(site):
    from visavis.cli import app
    from visavis.objectives import CATALOG

    catalog, api = (
        (site / "reference" / page).read_text()
        for page in ("catalogs/objectives.html", "python/visavis.losses.objectives.html")
    )
    for kind in CATALOG:
        assert f"images/objectives/{kind.__name__}.svg" in catalog
        assert (site / "images" / "objectives" / f"{kind.__name__}.svg").is_file()
        assert f'id="visavis.losses.objectives.{kind.__name__}"' in api
    commands = (site / "reference" / "command-line.html").read_text()
    assert all(
        f'id="visavis-{command.name or command.callback.__name__}"' in commands
        for command in app.registered_commands
    )


def test_site_shows_formulas_as_mathematics(site):
    """Each objective has its formula, and no dollar is left."""
    from visavis.objectives import CATALOG

    catalog = (site / "reference" / "catalogs" / "objectives.html").read_text()
    sections = {part.split('"')[0]: part for part in catalog.split('<h2 id="')[1:]}
    for kind in CATALOG:
        formula = re.search(
            r"Formula:</strong>(.*?)</li>", sections[kind.__name__.lower()], re.DOTALL
        )
        assert re.search(r"<msub>|<munder>", formula[1]), kind
        assert not re.search(r"<code>[^<\[]*[ ^/][^<]*</code>", formula[1]), kind
    pages = [page.read_text() for page in sorted(site.rglob("*.html"))]
    texts = [re.sub(r"(?s)<(pre|script|code).*?</\1>", "", page) for page in pages]
    assert [text for page in texts for text in re.findall(r"\$[^$<]+\$", page)] == []
    assert sum(page.count("<math") for page in pages) > 400


def test_build_fails_on_a_formula_with_two_readings(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'visavis[docs]'")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\nTake `$a / b c$`.\n")
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: test\nplugins: []\nhooks: [{PROJECT / 'tools' / 'formulas.py'}]\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "a / b c: expected parentheses around the fraction or its denominator" in done.stderr


def test_long_formulas_scroll_on_a_phone(site, browser):
    page = open_page(browser, "light", 360)
    page.goto((site / "reference" / "python" / "visavis.losses.objectives.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    frames = page.evaluate(
        "[...document.querySelectorAll('.formula')].map(frame => [frame.tabIndex, frame.scrollWidth > frame.clientWidth])"
    )
    assert any(scrolls for _, scrolls in frames)
    assert {index for index, scrolls in frames if scrolls} == {0}
    inline = page.evaluate(
        "[...document.querySelectorAll('math')].filter(math => !math.closest('.formula, .md-typeset__table')"
        " && math.getBoundingClientRect().right > innerWidth).length"
    )
    assert inline == 0
    page.context.close()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser, scheme, width):
    return browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 800}
    ).new_page()


def violations(axe, page, path):
    """Serious accessibility violations of a page, and whether it is wider than the screen."""
    page.goto(path.as_uri())
    found = axe.run(page, options={"resultTypes": ["violations"], "preload": False}).response[
        "violations"
    ]
    problems = [
        (one["id"], one["nodes"][0]["html"][:120])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
    return problems + (
        []
        if page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        else ["wider than the screen"]
    )


def check_pages(browser, paths, layouts):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    ).Axe()
    for scheme, width in layouts:
        page = open_page(browser, scheme, width)
        assert [
            (path.name, problems) for path in paths if (problems := violations(axe, page, path))
        ] == [], (scheme, width)
        dark = page.evaluate("document.body.dataset.mdColorScheme") == "slate"
        assert dark == (scheme == "dark")
        page.context.close()


def test_site_sample_is_accessible_in_each_layout(site, browser):
    check_pages(browser, [site / page for page in SAMPLE[:2]], [LAYOUTS[0]])
    check_pages(browser, [site / page for page in SAMPLE[1:]], [LAYOUTS[3]])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_site_is_accessible_in_each_layout(site, browser):
    # 404.html names its style sheets from the root of a server, so that it cannot be opened from the file system.
    check_pages(
        browser, sorted(path for path in site.rglob("*.html") if path.name != "404.html"), LAYOUTS
    )


@pytest.mark.parametrize("width", [1200, 360])
def test_site_search_works_without_a_server(site, browser, width):
    page = open_page(browser, "light", width)
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((site / "index.html").as_uri())
    if width < 900:
        page.click("label.md-header__button[for=__search]")
    page.click(".md-search__input")
    page.keyboard.type("triplet")
    page.wait_for_function(
        "/matching/.test(document.querySelector('.md-search-result__meta').innerText)",
        timeout=20_000,
    )
    assert "Triplet" in page.inner_text(".md-search-result__list")
    assert [url for url in requests if not url.startswith(("file:", "data:", "about:"))] == []
    page.context.close()
