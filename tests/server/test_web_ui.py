"""The web UI in Chromium: mouse, keyboard, phone size, and both themes."""

from __future__ import annotations

import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from PIL import Image
from tests.platforms import posix
from tests.videos import write_video

import visavis
from visavis.data.feedback.records import Preference, QueryKey, latest_judgments
from visavis.data.feedback.sources import read_feedback
from visavis.retrieval.calibrate.calibration import Calibration
from visavis.retrieval.index_folder import read_manifest, write_manifest
from visavis.retrieval.items import NO_FILTER
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection

from .conftest import COLORS, MARKUP, SHAPES, photo, remove_votes, served

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is installed by make slow"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def votes(index_folder):
    """The index, which keeps the votes. There are none at first."""
    remove_votes(index_folder)
    return index_folder


@pytest.fixture(scope="module")
def address(votes):
    with served(votes, "--votes") as (url, _):
        yield url


@pytest.fixture(scope="module")
def long_address(runs, tmp_path_factory):
    """An index of 65 images without near-duplicates, which the start page shows one by one."""
    root = tmp_path_factory.mktemp("long")
    (root / "photos").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (65, 6, 8, 3), np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).resize((64, 48), 0).save(root / "photos" / f"{number:02}.png")
    with served(visavis.index(runs[0], root / "photos", out=root / "index").folder) as (url, _):
        yield url


@pytest.fixture(scope="module")
def shared_page(browser):
    """One page for all tests, because a new one starts three processes."""
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(20_000)
    yield page
    context.close()


@pytest.fixture
def open_page(shared_page):
    """Open an address with a size and theme. Errors on the console fail the test."""
    logged, page = [], shared_page

    def log_message(message):
        if message.type in ("error", "warning"):
            logged.append(f"{message.text} {message.location}")

    def log_error(error):
        logged.append(str(error))

    def open_url(url, width=1200, height=800, scheme="light", wait=".tile.shown"):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.on("console", log_message)
        page.on("pageerror", log_error)
        page.goto(url)
        page.wait_for_selector(wait)
        return page

    yield open_url
    page.remove_listener("console", log_message)
    page.remove_listener("pageerror", log_error)
    page.unroute_all()
    page.mouse.move(0, 0)
    page.evaluate("localStorage.clear()")
    page.goto("about:blank")
    assert [line for line in logged if "leaves.png" not in line] == [], (
        "except for the image that points outside"
    )


def search(page, text):
    page.fill("#text", text)
    page.wait_for_selector(f"h1:text-is('“{text}”')")
    page.wait_for_selector("#results[aria-busy=false]")


def names(page):
    return page.locator(".tile .open").evaluate_all("tiles => tiles.map((tile) => tile.title)")


def wait_for_focus(page, title_or_id):
    """Wait until an element has the focus. A closed dialog returns it in a later task, when its
    close event is delivered.
    """
    page.wait_for_function(
        "name => [document.activeElement.title, document.activeElement.id].includes(name)",
        arg=title_or_id,
    )


def drop(page, path):
    """Drop a file on the page."""
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


def test_web_ui_searches_while_typing_and_updates_url(open_page, address):
    page = open_page(address)
    assert page.inner_text("h1") == "Newest first"
    newest = names(page)
    page.locator("#text").press_sequentially("a red star", delay=15)
    page.wait_for_selector("h1:text-is('“a red star”')")
    page.wait_for_selector("#results[aria-busy=false]")
    found = names(page)
    assert found != newest
    assert page.locator(".tile .meter").count() == 0, "without a probability there is no bar"
    page.reload()
    page.wait_for_selector(".tile.shown")
    assert page.input_value("#text") == "a red star"
    assert names(page) == found


def test_web_ui_ignores_outdated_responses(open_page, address):
    page = open_page(address)

    def delay(route):
        time.sleep(0.4)
        route.continue_()

    page.route("**/api/search?text=a+green+star**", delay)
    page.fill("#text", "a green star")
    page.wait_for_timeout(250)
    search(page, "a blue circle")
    page.wait_for_timeout(600)
    assert page.inner_text("h1") == "“a blue circle”"


def test_web_ui_searches_by_dropped_image_and_text(open_page, address, collection_folder, tmp_path):
    page = open_page(address)
    photo("purple", "square", (400, 300)).save(tmp_path / "mine.png")
    drop(page, tmp_path / "mine.png")
    page.wait_for_selector("h1:text-is('Similar to your image')")
    page.wait_for_selector(".tile.shown")
    assert page.is_visible("#chip-image")
    assert "image=" in page.url
    page.fill("#text", "a star")
    page.wait_for_selector("h1:text-is('Similar to your image, “a star”')")
    page.click("#chip-remove")
    page.wait_for_selector("h1:text-is('“a star”')")
    page.set_input_files("#file", collection_folder / "trips" / "01.png")
    page.wait_for_selector("h1:has-text('Similar to your image')")


def test_web_ui_restores_preview_of_former_image(open_page, address, tmp_path):
    page = open_page(address)
    sources = []
    for color in ("purple", "teal"):
        photo(color, "square", (400, 300)).save(tmp_path / "mine.png")
        drop(page, tmp_path / "mine.png")
        changed = "former => document.querySelector('#chip-image').src !== former && location.search.includes('image=')"
        page.wait_for_function(changed, arg=sources[-1] if sources else "")
        page.wait_for_selector("#results[aria-busy=false]")
        sources.append(page.get_attribute("#chip-image", "src"))
    page.go_back()
    page.wait_for_function(
        "source => document.querySelector('#chip-image').src === source", arg=sources[0]
    )
    page.go_forward()
    page.wait_for_function(
        "source => document.querySelector('#chip-image').src === source", arg=sources[1]
    )
    assert page.evaluate("document.querySelector('#chip-image').naturalWidth") == 400


def test_web_ui_hides_preview_of_damaged_image(open_page, address, tmp_path):
    """The response to the upload is replaced, because the browser logs the error of the server."""
    page = open_page(address)
    response = page.request.get(f"{address}/api/search", params={"text": "a red star"}).json()
    response["query"]["image"] = "0" * 64
    page.route("**/api/search**", lambda route: route.fulfill(json=response))
    (tmp_path / "mine.jpg").write_text("not an image")
    page.set_input_files("#file", tmp_path / "mine.jpg")
    page.wait_for_selector("#chip-text:text-is('your image')")
    page.wait_for_selector("#chip-image", state="hidden")


def test_web_ui_fills_a_large_screen(open_page, shared_page, long_address):
    shared_page.route(
        "**/api/search**",
        lambda route: route.continue_(url=route.request.url.replace("limit=40", "limit=10")),
    )
    page = open_page(long_address, width=3840, height=2160)
    page.wait_for_selector(".tile:nth-child(65)")
    assert page.is_hidden("#more")


def test_web_ui_loads_more_results_on_scroll(open_page, long_address):
    page = open_page(long_address, height=500)
    assert page.locator(".tile").count() >= 40
    page.mouse.wheel(0, 20_000)
    page.wait_for_selector(".tile:nth-child(65)")
    assert page.locator(".tile").count() == 65
    assert len(set(names(page))) == 65
    assert page.is_hidden("#more")


def test_web_ui_more_like_this_and_history(open_page, address):
    page = open_page(address)
    search(page, "a red star")
    first = page.locator(".tile").first
    name = first.locator(".open").get_attribute("title")
    first.hover()
    first.locator(".act.like").click()
    page.wait_for_selector(f"h1:text-is('Similar to {name.rpartition('/')[2]}')")
    page.wait_for_selector(".tile.shown")
    assert names(page)[0] == name
    page.go_back()
    page.wait_for_selector("h1:text-is('“a red star”')")


def test_web_ui_restores_scroll_position(open_page, long_address):
    """All loaded results are loaded again, also after the next search by the keyboard, and after a
    reload.
    """
    page = open_page(long_address, height=500)
    page.mouse.wheel(0, 20_000)
    page.wait_for_selector(".tile:nth-child(65)")
    page.wait_for_function("scrollY > 1000")
    last = names(page)[-2]
    tile = page.locator(f".open[title='{last}']")
    tile.scroll_into_view_if_needed()
    before = page.evaluate("scrollY")
    tile.focus()
    page.keyboard.press("m")
    page.wait_for_selector("h1:has-text('Similar to')")
    page.wait_for_function("scrollY === 0")
    page.go_back()
    page.wait_for_selector("h1:text-is('Newest first')")
    page.wait_for_function("top => Math.abs(scrollY - top) < 2", arg=before)
    wait_for_focus(page, last)
    assert page.locator(".tile").count() == 65
    page.wait_for_timeout(300)
    page.reload()
    page.wait_for_selector(".tile:nth-child(65)")
    page.wait_for_function("top => Math.abs(scrollY - top) < 2", arg=before)
    page.go_forward()
    page.wait_for_selector("h1:has-text('Similar to')")


def test_web_ui_reports_the_end_of_results(open_page, shared_page, address):
    """Only the answer is changed, because a server with more than 1,000 items takes long to start."""

    def cut(route):
        found = route.fetch().json()
        found["sides"][0] |= {"has_more": False, "is_cut": True}
        route.fulfill(json=found)

    shared_page.route("**/api/search**", cut)
    page = open_page(address)
    assert (
        page.inner_text("#end")
        == f"These are the first {len(names(page))} results. Add words or filters to find others."
    )
    page.unroute_all()
    search(page, "a red star")
    assert page.inner_text("#end") == ""


def test_web_ui_documented_keys_work_at_the_start(open_page, address):
    page = open_page(address)
    wait_for_focus(page, "text")
    page.keyboard.press("/")
    page.keyboard.type("a red star")
    page.wait_for_selector("h1:text-is('“a red star”')")
    page.keyboard.type("/?")
    assert page.input_value("#text") == "a red star/?"
    page.fill("#text", "")
    page.keyboard.press("?")
    page.wait_for_selector("dialog#help[open]")


def test_web_ui_filters_and_empty_result(open_page, address):
    page = open_page(address)
    page.click("#filters-button")
    page.fill("#path", "trips")
    page.wait_for_selector("#filters-count:text-is('1')")
    page.wait_for_selector("#results[aria-busy=false] .tile")
    assert all(name.startswith("trips/") for name in names(page))
    page.fill("#path", "no such folder")
    page.wait_for_selector("#notice:has-text('No items match these filters.')")
    page.click("#filter-form [type=reset]")
    page.wait_for_selector(".tile.shown")


def test_web_ui_shows_markup_as_text(open_page, address):
    page = open_page(f"{address}/?path=onerror")
    assert names(page) == [MARKUP]
    page.click(".tile .open")
    assert page.inner_text("#detail-name") == MARKUP
    assert page.title() == "visavis"
    assert page.locator("#detail-name img").count() == 0


def test_web_ui_saves_and_undoes_votes(open_page, address, votes):
    page = open_page(address)
    search(page, "a teal circle")
    before = len(read_feedback(votes))
    tile = page.locator(".tile").first
    tile.hover()
    tile.locator(".act.relevant").click()
    page.wait_for_selector(".tile[data-vote=relevant]")
    page.click("#toast-undo")
    page.wait_for_selector(".tile[data-vote='']:first-child")
    tile.hover()
    tile.locator(".act.irrelevant").click()
    page.wait_for_selector(".tile[data-vote=irrelevant]")
    assert [line.relevant for line in read_feedback(votes)[before:]] == [False]
    page.reload()
    page.wait_for_selector(".tile[data-vote=irrelevant]")


def test_web_ui_undo_leaves_the_vote_of_another_page(browser, address, votes):
    """The second page was loaded before the vote of the first, so it shows no vote that it could
    restore.
    """
    context = browser.new_context(reduced_motion="reduce")
    first, second = context.new_page(), context.new_page()
    for page in (first, second):
        page.goto(f"{address}/?q=a+blue+square")
        page.wait_for_selector(".tile.shown")
    for page in (first, second):
        page.locator(".tile").first.hover()
        page.locator(".tile").first.locator(".act.relevant").click()
        page.wait_for_selector(".tile[data-vote=relevant]")
    second.click("#toast-undo")
    second.wait_for_selector("#toast-text:text-is('Vote undone. Another vote applies: relevant.')")
    assert second.locator(".tile[data-vote=relevant]").count() == 1
    key = QueryKey("a blue square")
    assert [
        judgment.relevant
        for (query, _), judgment in latest_judgments(read_feedback(votes)).items()
        if query == key
    ] == [True]
    context.close()


def test_web_ui_requests_votes_on_uncertain_pairs(open_page, address, votes):
    page = open_page(address)
    search(page, "a purple square")
    before = len(read_feedback(votes))
    page.click("#feedback-button")
    page.wait_for_selector("#feedback-frame:visible")
    page.keyboard.press("y")
    page.wait_for_selector("#feedback-note:text-matches('2 of|Done')")
    page.keyboard.press("Escape")
    assert len(read_feedback(votes)) == before + 1


def test_web_ui_by_keyboard_only(open_page, address, votes):
    page = open_page(address)
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    page.locator("body").press("/")
    wait_for_focus(page, "text")
    page.keyboard.type("an orange star")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text-is('“an orange star”')")
    page.wait_for_selector("#results[aria-busy=false]")
    page.wait_for_selector(".tile.shown")
    found = names(page)
    page.keyboard.press("ArrowDown")
    wait_for_focus(page, found[0])
    page.keyboard.press("ArrowRight")
    wait_for_focus(page, found[1])
    columns = page.locator(".grid").evaluate(
        "grid => getComputedStyle(grid).gridTemplateColumns.split(' ').length"
    )
    page.keyboard.press("ArrowDown")
    wait_for_focus(page, found[1 + columns])
    page.keyboard.press("ArrowUp")
    page.keyboard.press("y")
    page.wait_for_selector(".tile[data-vote=relevant]")
    page.keyboard.press("z")
    page.wait_for_selector(".tile[data-vote=relevant]", state="detached")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog#detail[open]")
    assert page.inner_text("#detail-properties").find(found[1]) > 0
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(f"#detail-name:text-is('{found[2].rpartition('/')[2]}')")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog#detail[open]", state="detached")
    wait_for_focus(page, found[2])
    page.keyboard.press("m")
    page.wait_for_selector("h1:has-text('Similar to ')")
    wait_for_focus(page, names(page)[0])
    page.keyboard.press("Escape")
    wait_for_focus(page, "text")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_web_ui_is_accessible(open_page, address, scheme, width):
    """No element is wider than the screen, and axe-core finds no serious problem in the results,
    filters and dialogs.
    """
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    ).Axe()
    page = open_page(address, width=width, scheme=scheme)
    search(page, "a red star")
    page.wait_for_selector(".tile.shown")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 22)"
    assert dark == (scheme == "dark")

    def check():
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        violations = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
        assert [
            (one["id"], [node["html"][:90] for node in one["nodes"]])
            for one in violations
            if one["impact"] in ("serious", "critical")
        ] == []

    page.click("#filters-button")
    check()
    for opener, dialog in (
        (".tile .open >> nth=0", "#detail"),
        ("#help-button", "#help"),
        ("#feedback-button", "#feedback"),
    ):
        page.click(opener)
        page.wait_for_selector(f"dialog{dialog}[open]")
        check()
        page.keyboard.press("Escape")


def test_web_ui_logs_in_by_the_form(browser, index_folder):
    context = browser.new_context()
    with served(index_folder, "--token", "a-long-enough-token") as (url, _):
        page = context.new_page()
        page.goto(f"{url}/?q=a+red+star")
        for token in ("a-wrong-token", "a-long-enough-token"):
            page.fill("#token", token)
            page.click("button[type=submit]")
            page.wait_for_selector(
                ".wrong:text('not correct')" if token == "a-wrong-token" else ".tile.shown"
            )
        assert page.url == f"{url}/"
    context.close()


def test_web_ui_remembers_theme(open_page, address):
    page = open_page(address, scheme="light")
    page.click("#theme")
    page.click("#theme")
    assert page.get_attribute("#theme", "aria-label") == "Theme: dark"
    page.reload()
    page.wait_for_selector(".tile.shown")
    assert page.get_attribute("html", "data-theme") == "dark"


@pytest.mark.parametrize(
    ("count", "wait", "text"),
    [(60, ".tile.shown", "60 items, the index is unfinished"), (0, "#notice:visible", "")],
)
def test_web_ui_reports_unfinished_index(open_page, shared_page, address, count, wait, text):
    """The server is real. Only its answer about the index is changed, because an interrupted update
    ends with its process.
    """

    def change_info(route):
        info = route.fetch().json()
        info["indexes"][0] |= {"unfinished": True, "count": count}
        route.fulfill(json=info)

    def remove_hits(route):
        found = route.fetch().json()
        found["sides"][0] |= {"hits": [], "has_more": False}
        route.fulfill(json=found)

    shared_page.route("**/api/info**", change_info)
    if not count:
        shared_page.route("**/api/search**", remove_hits)
    page = open_page(address, wait=wait)
    assert page.inner_text("#summary") == text
    assert (
        count
        or page.inner_text("#notice")
        == "This index is unfinished and has no items yet. Run visavis index again to complete it."
    )


@pytest.fixture(scope="module")
def pair(indexes):
    """Two indexes to compare: the address, the process and the second index."""
    remove_votes(indexes[1])
    with served(*indexes, "--votes") as (url, process):
        yield url, process, indexes[1]


def test_web_ui_compares_two_indexes(open_page, pair):
    page = open_page(pair[0], wait="#notice:visible")
    search(page, "a red star")
    page.wait_for_selector(".tile.shown")
    assert page.locator(".side h2").all_inner_texts() == ["Left", "Right"]
    page.locator("#results").press("1")
    page.wait_for_selector("#preference-text:has-text('You preferred')")
    assert sorted(page.locator(".side h2").all_inner_texts()) == ["one", "two"]
    [preference] = read_feedback(pair[2])
    assert isinstance(preference, Preference)
    assert preference.preferred == preference.left


def test_web_ui_retries_after_failed_start(browser, address):
    context = browser.new_context()
    page = context.new_page()
    raised = []
    page.on("pageerror", lambda error: raised.append(error))
    pattern = re.compile("/api/(info|facets)")
    page.route(pattern, lambda route: route.abort())
    page.goto(f"{address}/?q=a+star&path=trips")
    page.wait_for_selector("#notice:has-text('The server does not respond.')")
    page.unroute(pattern)
    page.click("#notice button")
    page.wait_for_selector("h1:text-is('“a star”')")
    page.wait_for_selector(".tile.shown")
    assert page.input_value("#path") == "trips"
    assert page.inner_text("#summary").startswith("6")
    assert page.is_visible("#feedback-button")
    assert raised == []
    context.close()


def test_web_ui_hides_weaker_results_below_a_line(open_page, index_folder, tmp_path):
    folder = tmp_path / "index"
    shutil.copytree(index_folder, folder)
    with closing(open_index(folder)) as index:
        query = SearchQuery.from_text("a red star")
        found = search_collection(index, query, 10)
        encoded = index.encode_query(query)
        scores, standardized = index.rated_scores(encoded, NO_FILTER)
    values = np.unique(standardized)[::-1]
    middle = (values[2] + values[3]) / 2
    strong = scores[standardized > middle].min()
    manifest = read_manifest(folder)
    knots = {"scores": (middle - 1e-6, middle), "probabilities": (0.0, 1.0)}
    counts = {"num_candidates": manifest.digest.num_items, "num_queries": 10}
    calibration = Calibration(**knots, **counts, min_score=-9.0, detection_rate=0.0)
    write_manifest(folder, replace(manifest, calibration=calibration))
    num_strong = sum(hit.score >= strong for hit in found)
    with served(folder) as (url, _):
        page = open_page(url)
        search(page, "a red star")
        # Certain matches, and fewer irrelevant results than those.
        visible = page.locator(".tile:visible")
        assert visible.count() == 2 * num_strong - 1
        assert page.locator(".tile").count() > visible.count()
        assert page.is_hidden("#more")
        page.click("text=Show weaker results")
        assert visible.count() == page.locator(".tile").count()
        page.click("text=Hide weaker results")
        assert visible.count() == 2 * num_strong - 1


@posix
def test_web_ui_names_unknown_words_and_missing_probabilities(open_page, address):
    page = open_page(address)
    assert page.inner_text("#remark") == ""
    search(page, "a red star zzz")
    remark = page.inner_text("#remark")
    assert remark.startswith("The model does not know: zzz. These are the nearest items.")
    assert page.locator(".tile .meter").count() == 0
    page.locator(".tile .open").first.click()
    assert page.locator("#detail .meter").count() == 0


def test_web_ui_escape_keeps_the_query(open_page, address):
    page = open_page(address)
    search(page, "a red star")
    page.press("#text", "Escape")
    assert page.input_value("#text") == "a red star"


def test_web_ui_on_a_phone_has_words_in_place_of_keys(open_page, address):
    page = open_page(address, width=390, height=844)
    assert page.inner_text("#feedback-button").strip() == "Vote"
    assert page.inner_text(".mark") == "visavis"
    page.click("#help-button")
    page.wait_for_selector("#help[open]")
    assert page.locator("#help kbd:visible").count() == 0


def test_web_ui_shows_times_in_one_format(open_page, address, tmp_path):
    page = open_page(address)
    taken = page.evaluate(
        """async () => {
            const { metadataValue, moment } = await import("./format.js");
            return ["2024-06-10T12:00:00.000+00:00", "2024-06-10T23:05:00+09:00", "June"].map(metadataValue)
                .concat(moment("2024-01-02T03:04:05Z", "UTC"));
        }"""
    )
    assert taken == [
        "June 10, 2024, 12:00",
        "June 10, 2024, 23:05",
        "June",
        "January 2, 2024, 03:04",
    ]
    page.locator(".tile .open").first.click()
    assert re.search(
        r"Modified\s+[A-Z]\w+ \d+, \d{4}, \d\d:\d\d", page.inner_text("#detail-properties")
    )


def test_web_ui_documents_the_api_offline(open_page, address):
    page = open_page(f"{address}/docs", wait="#routes section")
    routes = page.locator("#routes h2").all_inner_texts()
    schema = page.request.get(f"{address}/openapi.json").json()
    assert len(routes) == sum(len(methods) for methods in schema["paths"].values())
    text = page.inner_text("#routes")
    assert "/v1/embeddings" in text
    assert "undefined" not in text


def test_web_ui_plays_a_video_from_its_moment(browser, runs, tmp_path):
    """VP9, because Chromium of Debian also decodes it where H.264 is missing."""
    (tmp_path / "clips").mkdir()
    frames = [np.full((64, 64, 3), 4 * number, np.uint8) for number in range(60)]
    write_video(tmp_path / "clips" / "a.webm", frames, codec="libvpx-vp9")
    index = visavis.index(runs[0], tmp_path / "clips", out=tmp_path / "index").folder
    with served(index) as (url, _), closing(browser.new_page()) as page:
        page.goto(url)
        page.wait_for_selector(".tile.shown")
        page.locator(".tile .open").first.click()
        page.wait_for_selector("#detail-video", state="visible")
        page.evaluate("document.getElementById('detail-video').play()")
        page.wait_for_function("document.getElementById('detail-video').currentTime > 0.2")
        page.keyboard.press("Escape")
        page.wait_for_selector("#detail-video", state="hidden")


def test_web_ui_follows_photos_that_move_go_and_come(browser, runs, tmp_path):
    """The page stays open while 1,000 photos move, half of them go, and come back."""
    photos, away = tmp_path / "photos", tmp_path / "away"
    for folder in (photos / "old", away):
        folder.mkdir(parents=True)
    for number in range(1000):
        image = photo(COLORS[number % 6], SHAPES[number // 6 % 3], (64 + number // 18, 48), number)
        image.save(photos / "old" / f"{number:04}.png")
    index = visavis.index(runs[0], photos, out=tmp_path / "index").folder

    def move(numbers, source, target):
        target.mkdir(exist_ok=True)
        for number in numbers:
            (source / f"{number:04}.png").rename(target / f"{number:04}.png")

    changes = [
        (partial(move, range(1000), photos / "old", photos / "new"), 1000),
        (partial(move, range(0, 1000, 2), photos / "new", away), 500),
        (partial(move, range(0, 1000, 2), away, photos / "old"), 1000),
    ]
    with served(index) as (url, _), ThreadPoolExecutor(1) as pool:
        page = browser.new_page()
        page.goto(f"{url}/?q=a+red+star")
        page.wait_for_selector(".tile.shown")
        for change, count in changes:
            change()
            updated = pool.submit(visavis.index, runs[0], photos, out=index)
            text = f"The collection changed and has {count:,} items now."
            deadline = time.monotonic() + 120
            while page.inner_text("#changed") != text:
                assert time.monotonic() < deadline
                page.mouse.wheel(0, 1500)
                page.wait_for_timeout(100)
                assert page.locator(".tile.missing").count() == 0
            updated.result()
            page.wait_for_selector("#results[aria-busy=false]")
            page.wait_for_selector(".tile.shown")
            present = {path.relative_to(photos).as_posix() for path in photos.rglob("*.png")}
            assert set(names(page)) <= present
            assert page.locator(".tile.missing").count() == 0


def test_web_ui_reports_stopped_server(browser, pair):
    context = browser.new_context()
    page = context.new_page()
    page.goto(pair[0])
    page.wait_for_selector("#notice:visible")
    pair[1].send(signal.SIGTERM)
    pair[1].wait(20)
    page.fill("#text", "a star")
    page.wait_for_selector("#notice:has-text('The server does not respond.')")
    assert page.is_visible("#notice button")
    context.close()
