"""``visavis serve`` behind a reverse proxy that serves it below a path, with and without the path
in the requests to the server.
"""

from __future__ import annotations

import http.client
import re
import shutil
from http.cookies import SimpleCookie
from urllib.parse import urljoin, urlsplit

import pytest
from fastapi.testclient import TestClient

import visavis
from visavis.core.errors import VisavisError
from visavis.retrieval.server.application import create_app, web_ui_files
from visavis.retrieval.server.limits import RateLimits

from .conftest import remove_votes, served
from .reverse_proxy import PREFIX, behind_proxy

TOKEN = "a-long-enough-token"
HOST = {"host": "photos.example"}
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def proxied(collection, prefix=PREFIX, **options):
    """A client that requests with the prefix, and one without it, as after a proxy that removes it."""
    app = create_app([collection], host_names=["photos.example"], root_path=prefix, **options)
    return [
        TestClient(app, base_url=f"http://photos.example{path}", follow_redirects=False)
        for path in (prefix, "")
    ]


def test_web_ui_has_only_relative_urls():
    for name, (content, _, _) in web_ui_files().items():
        text = content.decode()
        assert not re.search(
            r"""(?:href|src|action)=["']/|url\(["']?/|["'`]/(?:api|login|[\w-]+\.(?:js|css|svg))""",
            text,
        ), name


def test_requests_with_and_without_prefix_are_answered_alike(collection):
    kept, removed = proxied(collection)
    for path in (
        "/",
        "/app.js",
        "/health",
        "/api/search?limit=3",
        "/api/info",
        "/openapi.json",
        "/none",
    ):
        first, second = kept.get(path), removed.get(path)
        assert (first.status_code, first.headers.get("content-type")) == (
            second.status_code,
            second.headers.get("content-type"),
        ), path
    assert kept.get("/openapi.json").json()["servers"] == [{"url": PREFIX}]
    redirect = TestClient(kept.app, base_url="http://photos.example", follow_redirects=False).get(
        PREFIX
    )
    assert (redirect.status_code, redirect.headers["location"]) == (307, f"{PREFIX}/")


def test_prefix_bypasses_neither_token_nor_rate(collection):
    for client in proxied(collection, token=TOKEN, rates=RateLimits(burst=100, per_s=0.001)):
        for path in ("/api/search", "/photos/api/search", "/photosx/health", "/app.js"):
            response = client.get(path)
            assert response.status_code in (401, 404), path
            assert "sides" not in response.text
        assert client.get("/api/info", headers={"host": "evil.example"}).status_code == 403
    clients = proxied(collection, rates=RateLimits(burst=80, per_s=0.001))
    costs = [
        next(number for number in range(20) if client.get("/api/search").status_code == 429)
        for client in clients
    ]
    assert costs == [10, 0], "both paths cost 8 units of the same client"


def test_login_stays_below_prefix(collection):
    for client in proxied(collection, token=TOKEN):
        page = f"{str(client.base_url).rstrip('/')}/"
        login = client.get("/", params={"token": TOKEN})
        assert urljoin(page, login.headers["location"]) == f"{page}login?token={TOKEN}"
        entered = client.post(
            "/login", data={"token": TOKEN}, headers={"origin": "http://photos.example"}
        )
        assert urljoin(f"{page}login", entered.headers["location"]) == page
        [cookie] = SimpleCookie(entered.headers["set-cookie"]).values()
        assert (cookie["path"], cookie["httponly"], cookie["samesite"]) == (
            f"{PREFIX}/",
            True,
            "strict",
        )


@pytest.mark.parametrize("bound_to", ["127.0.0.1", None])
def test_host_header_must_be_loopback_or_a_given_name(collection, bound_to):
    app = create_app(
        [collection],
        bound_to=bound_to,
        host_names=["Photos.example", "bücher.example"],
        token=TOKEN,
    )
    with TestClient(app, base_url="http://localhost") as client:
        for host, status in {
            "photos.example": 200,
            "PHOTOS.example:8443": 200,
            "xn--bcher-kva.example": 200,
            "localhost:8000": 200,
            "evil.example": 403,
            "photos.example.evil.example": 403,
            "a.photos.example": 403,
            "photos.example.": 403,
            "": 403,
        }.items():
            assert client.get("/health", headers={"host": host}).status_code == status, host
        vote = {
            "headers": {
                "host": "photos.example",
                "origin": "https://evil.example",
                "authorization": f"Bearer {TOKEN}",
            }
        }
        assert client.post("/api/votes", json={}, **vote).status_code == 403


@pytest.mark.parametrize(
    "name",
    [
        "",
        "*",
        "*.example",
        "https://photos.example",
        "photos.example:80",
        "photos.example/",
        "a b",
        "a..b",
        ".",
    ],
)
def test_serve_rejects_invalid_host_names(index_folder, name):
    with pytest.raises(VisavisError, match="host_name: expected a name such as"):
        visavis.serve(index_folder, port=0, host_name=["photos.example", name])


@pytest.mark.parametrize(
    "path",
    ["photos", "//evil.example", "/a//b", "/a b", "/a?b", "/..", "/a/../b", "https://a/b", "/ä"],
)
def test_serve_rejects_invalid_root_paths(index_folder, path):
    with pytest.raises(VisavisError, match="root_path: expected a path such as"):
        visavis.serve(index_folder, port=0, root_path=path)


@pytest.mark.slow
@pytest.mark.parametrize("keeps_prefix", [False, True])
def test_server_process_behind_proxy(index_folder, keeps_prefix):
    options = ("--host-name", "photos.localhost", "--root-path", f"{PREFIX}/", "--token", TOKEN)
    with (
        served(index_folder, *options) as (target, _),
        behind_proxy(target, keeps_prefix=keeps_prefix) as (page, outside),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(page).port)

        def request(method, path, body=None, **headers):
            connection.request(
                method, f"{PREFIX}/{path}", body, {"Host": urlsplit(page).netloc, **headers}
            )
            response = connection.getresponse()
            response.read()
            return response

        entered = request("POST", "login", f"token={TOKEN}", Origin=page.removesuffix(f"{PREFIX}/"))
        assert (entered.status, entered.headers["location"]) == (303, "./")
        assert "Secure" in entered.headers["set-cookie"], "the proxy is reached by https"
        assert request("GET", "api/search").status == 401
        assert request("GET", "api/search", Authorization=f"Bearer {TOKEN}").status == 200
        assert (
            request(
                "POST",
                "api/votes",
                "{}",
                Origin="https://evil.example",
                Authorization=f"Bearer {TOKEN}",
            ).status
            == 403
        )
        assert request("GET", "health", Host="evil.example").status == 403
        connection.close()
        assert outside == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "keeps_prefix"),
    [((), False), (("--root-path", PREFIX), False), (("--root-path", PREFIX), True)],
)
def test_web_ui_behind_proxy(index_folder, options, keeps_prefix):
    """Page, styles, images, search, votes and the address of a shared query stay below the prefix."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install 'visavis[dev]'"
    )
    options = (*options, "--host-name", "photos.localhost", "--votes")
    remove_votes(index_folder)
    with (
        served(index_folder, *options) as (target, _),
        behind_proxy(target, keeps_prefix=keeps_prefix) as (address, outside),
    ):
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page, logged = browser.new_page(), []
            page.on(
                "console",
                lambda message: (
                    logged.append(message.text) if message.type in ("error", "warning") else None
                ),
            )
            page.on("pageerror", lambda error: logged.append(str(error)))
            page.goto(address)
            page.wait_for_selector(".tile.shown")
            assert (
                page.evaluate("getComputedStyle(document.querySelector('.grid')).display") == "grid"
            ), "the style sheet is used"
            page.fill("#text", "a red star")
            page.wait_for_selector("h1:text-is('“a red star”')")
            assert page.url == f"{address}?q=a+red+star"
            page.locator(".tile").first.hover()
            page.locator(".tile").first.locator(".act.relevant").click()
            page.wait_for_selector(".tile[data-vote=relevant]")
            page.reload()
            page.wait_for_selector(".tile[data-vote=relevant]")
            page.click(".mark")
            page.wait_for_selector("h1:text-is('Newest first')")
            assert page.url == address
            browser.close()
        assert [line for line in logged if "404" not in line or "leaves.png" in line] == []
        assert outside == []
