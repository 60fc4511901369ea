"""The page in a real browser: what a person does there, by mouse, by keys alone, on a phone, in both themes."""

from __future__ import annotations

import shutil
import time

import pytest

from visavis.data.judgements import Preference, read_judgements

from .conftest import MARKUP, photo, served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'visavis[dev]'")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def votes(tmp_path_factory):
    return tmp_path_factory.mktemp("votes") / "votes.jsonl"


@pytest.fixture(scope="module")
def address(index_folder, votes):
    with served(index_folder, "--judgements", votes) as (url, _):
        yield url


@pytest.fixture
def open_page(browser):
    """Opens a page of a size and theme; at the end nothing may stand on its console."""
    contexts, said = [], []

    def opened(url, width=1200, height=800, scheme="light", wait=".tile.shown"):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on(
            "console", lambda message: said.append(f"{message.text} {message.location}") if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        page.wait_for_selector(wait)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [line for line in said if "leaves.png" not in line] == [], "but for the one picture that may not be shown"


def ask(page, text):
    page.fill("#text", text)
    page.wait_for_selector(f"h1:text-is('“{text}”')")
    page.wait_for_selector("#results[aria-busy=false]")


def names(page):
    return page.locator(".tile .open").evaluate_all("tiles => tiles.map((tile) => tile.title)")


def focused(page):
    return page.evaluate("document.activeElement.title || document.activeElement.id")


def drop(page, path):
    """Let go of a file over the page."""
    transfer = page.evaluate_handle(
        """async (bytes) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
            return transfer;
        }""",
        list(path.read_bytes()),
    )
    for kind in ("dragenter", "dragover", "drop"):
        page.dispatch_event("main", kind, {"dataTransfer": transfer})


def test_results_come_as_one_types_and_the_address_remembers(open_page, address):
    page = open_page(address)
    assert page.inner_text("h1") == "Newest first"
    newest = names(page)
    page.locator("#text").press_sequentially("a red star", delay=15)
    page.wait_for_selector("h1:text-is('“a red star”')")
    page.wait_for_selector("#results[aria-busy=false]")
    found = names(page)
    assert found != newest
    assert page.locator(".tile .meter").count() == len(found)
    page.reload()
    page.wait_for_selector(".tile.shown")
    assert page.input_value("#text") == "a red star"
    assert names(page) == found


def test_an_answer_that_is_out_of_date_is_dropped(open_page, address):
    page = open_page(address)

    def late(route):
        time.sleep(0.4)
        route.continue_()

    page.route("**/api/search?text=a+green+star**", late)
    page.fill("#text", "a green star")
    page.wait_for_timeout(250)
    ask(page, "a blue circle")
    page.wait_for_timeout(600)
    assert page.inner_text("h1") == "“a blue circle”"


def test_a_dropped_picture_is_searched_by_and_words_may_be_added(open_page, address, collection_folder, tmp_path):
    page = open_page(address)
    photo("purple", "square", (400, 300)).save(tmp_path / "mine.png")
    drop(page, tmp_path / "mine.png")
    page.wait_for_selector("h1:text-is('Like your picture')")
    page.wait_for_selector(".tile.shown")
    assert page.is_visible("#chip-picture")
    assert "picture=" in page.url
    page.fill("#text", "a star")
    page.wait_for_selector("h1:text-is('Like your picture, “a star”')")
    page.click("#chip-remove")
    page.wait_for_selector("h1:text-is('“a star”')")
    page.set_input_files("#file", collection_folder / "trips" / "01.png")
    page.wait_for_selector("h1:has-text('Like your picture')")


def test_more_results_come_where_the_page_ends(open_page, address):
    page = open_page(address, height=500)
    assert page.locator(".tile").count() >= 40
    page.mouse.wheel(0, 20_000)
    page.wait_for_selector(".tile:nth-child(65)")
    assert page.locator(".tile").count() == 65
    assert len(set(names(page))) == 65
    assert page.is_hidden("#more")


def test_more_like_this_and_the_way_back(open_page, address):
    page = open_page(address)
    ask(page, "a red star")
    first = page.locator(".tile").first
    name = first.locator(".open").get_attribute("title")
    first.hover()
    first.locator(".act.like").click()
    page.wait_for_selector(f"h1:text-is('Like {name.rpartition('/')[2]}')")
    page.wait_for_selector(".tile.shown")
    assert names(page)[0] == name
    page.go_back()
    page.wait_for_selector("h1:text-is('“a red star”')")


def test_filters_narrow_and_an_empty_result_says_so(open_page, address):
    page = open_page(address)
    page.click("#filters-button")
    page.fill("#path", "trips")
    page.wait_for_selector("#filters-count:text-is('1')")
    page.wait_for_selector("#results[aria-busy=false] .tile")
    assert all(name.startswith("trips/") for name in names(page))
    page.fill("#path", "no such folder")
    page.wait_for_selector("#notice:has-text('Nothing passes these filters.')")
    page.click("#filter-form [type=reset]")
    page.wait_for_selector(".tile.shown")


def test_names_with_markup_are_text(open_page, address):
    page = open_page(f"{address}/?path=onerror")
    assert names(page) == [MARKUP]
    page.click(".tile .open")
    assert page.inner_text("#detail-name") == MARKUP
    assert page.title() == "visavis"
    assert page.locator("#detail-name img").count() == 0


def test_votes_are_kept_and_taken_back(open_page, address, votes):
    page = open_page(address)
    ask(page, "a teal circle")
    before = len(read_judgements(votes))
    tile = page.locator(".tile").first
    tile.hover()
    tile.locator(".act.fits").click()
    page.wait_for_selector(".tile[data-vote=fits]")
    page.click("#toast-undo")
    page.wait_for_selector(".tile[data-vote='']:first-child")
    tile.hover()
    tile.locator(".act.not").click()
    page.wait_for_selector(".tile[data-vote=not]")
    assert [line.fits for line in read_judgements(votes)[before:]] == [True, None, False]
    page.reload()
    page.wait_for_selector(".tile[data-vote=not]")


def test_the_page_asks_what_would_teach_most(open_page, address, votes):
    page = open_page(address)
    ask(page, "a purple square")
    before = len(read_judgements(votes))
    page.click("#teach-button")
    page.wait_for_selector("#teach-frame:visible")
    page.keyboard.press("y")
    page.wait_for_selector("#teach-note:text-matches('2 of|Thank you')")
    page.keyboard.press("Escape")
    assert len(read_judgements(votes)) == before + 1


def test_everything_by_keys_alone(open_page, address, votes):
    page = open_page(address)
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    page.locator("body").press("/")
    assert focused(page) == "text"
    page.keyboard.type("an orange star")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text-is('“an orange star”')")
    page.wait_for_selector(".tile.shown")
    found = names(page)
    page.keyboard.press("ArrowDown")
    assert focused(page) == found[0]
    page.keyboard.press("ArrowRight")
    assert focused(page) == found[1]
    columns = page.locator(".grid").evaluate("grid => getComputedStyle(grid).gridTemplateColumns.split(' ').length")
    page.keyboard.press("ArrowDown")
    assert focused(page) == found[1 + columns]
    page.keyboard.press("ArrowUp")
    page.keyboard.press("y")
    page.wait_for_selector(".tile[data-vote=fits]")
    page.keyboard.press("z")
    page.wait_for_selector(".tile[data-vote=fits]", state="detached")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog#detail[open]")
    assert page.inner_text("#detail-facts").find(found[1]) > 0
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(f"#detail-name:text-is('{found[2].rpartition('/')[2]}')")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog#detail[open]", state="detached")
    assert focused(page) == found[2]
    page.keyboard.press("m")
    page.wait_for_selector("h1:has-text('Like ')")
    page.keyboard.press("Escape")
    assert focused(page) == "text"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_both_themes_and_a_phone_are_readable(open_page, address, scheme, width):
    """Nothing is wider than the screen; axe-core finds nothing serious in the results, the large view, filters, keys and questions."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed").Axe()
    page = open_page(address, width=width, scheme=scheme)
    ask(page, "a red star")
    page.wait_for_selector(".tile.shown")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 22)"
    assert dark == (scheme == "dark")

    def check():
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
        assert [
            (one["id"], [node["html"][:90] for node in one["nodes"]]) for one in found if one["impact"] in ("serious", "critical")
        ] == []

    page.click("#filters-button")
    check()
    for opener, dialog in ((".tile .open >> nth=0", "#detail"), ("#help-button", "#help"), ("#teach-button", "#teach")):
        page.click(opener)
        page.wait_for_selector(f"dialog{dialog}[open]")
        check()
        page.keyboard.press("Escape")


def test_a_theme_that_is_chosen_stays(open_page, address):
    page = open_page(address, scheme="light")
    page.click("#theme")
    page.click("#theme")
    assert page.get_attribute("#theme", "aria-label") == "Theme: dark"
    page.reload()
    page.wait_for_selector(".tile.shown")
    assert page.get_attribute("html", "data-theme") == "dark"


@pytest.fixture(scope="module")
def pair(indexes, tmp_path_factory):
    """Two indexes side by side: the address, the process and the file of votes."""
    file = tmp_path_factory.mktemp("votes") / "votes.jsonl"
    with served(*indexes, "--judgements", file) as (url, process):
        yield url, process, file


def test_two_indexes_side_by_side(open_page, pair):
    page = open_page(pair[0], wait="#notice:visible")
    ask(page, "a red star")
    page.wait_for_selector(".tile.shown")
    assert page.locator(".side h2").all_inner_texts() == ["Left", "Right"]
    page.locator("#results").press("1")
    page.wait_for_selector("#choice-text:has-text('You preferred')")
    assert sorted(page.locator(".side h2").all_inner_texts()) == ["one", "two"]
    [choice] = read_judgements(pair[2])
    assert isinstance(choice, Preference)
    assert choice.preferred == choice.left


def test_a_service_that_has_gone_is_said(browser, pair):
    context = browser.new_context()
    page = context.new_page()
    page.goto(pair[0])
    page.wait_for_selector("#notice:visible")
    pair[1].terminate()
    pair[1].wait(20)
    page.fill("#text", "a star")
    page.wait_for_selector("#notice:has-text('The service does not answer.')")
    assert page.is_visible("#notice button")
    context.close()
