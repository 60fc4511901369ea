"""HTTP API: search, images, votes, access control and errors."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import shutil
import threading
import time
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from tests import photos
from tests.platforms import posix
from tests.videos import write_video

import visavis
from visavis.core.errors import VisavisError
from visavis.data.feedback.records import QueryKey, latest_judgments
from visavis.data.feedback.sources import read_feedback
from visavis.retrieval.index_folder import read_manifest, write_manifest
from visavis.retrieval.items import NO_FILTER
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import (
    SearchQuery,
    SearchResult,
    grouped_results,
    search_collection,
)
from visavis.retrieval.server.application import create_app
from visavis.retrieval.server.limits import RateLimits, ServerLimits, ServerMetrics
from visavis.retrieval.server.search_service import SearchService, ServedIndex
from visavis.retrieval.server.security import SECURITY_HEADERS
from visavis.retrieval.server.vote_store import VoteStore

from .conftest import COLORS, MARKUP, SHAPES, photo, photo_with_exif, remove_votes


def hits(client, **params):
    response = client.get("/api/search", params=params)
    assert response.status_code == 200, response.text
    return response.json()["sides"][0]["hits"]


def error_of(response, status):
    """The message of an error response."""
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    message = response.json()["error"]
    assert message.endswith(".")
    assert "\n" not in message
    return message


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_search_pages_equal_index_search(shared_client, collection):
    first = hits(shared_client, text="a red circle", limit=20)
    second = hits(shared_client, text="a red circle", limit=20, offset=20)
    expected = search_collection(collection.index, SearchQuery.from_text("a red circle"), 120).hits
    assert [hit["key"] for hit in first + second] == [hit.item.key for hit in expected[:40]]
    assert [hit["score"] for hit in first] == pytest.approx([hit.score for hit in expected[:20]])


def test_waiting_searches_are_encoded_in_one_batch(index_folder, monkeypatch):
    """Equal results to single searches. A query without a known word fails alone, and equal queries
    are searched once.
    """
    index, batches, searches = ServedIndex(open_index(index_folder)), [], []
    encode, search, started = index.index.model.encode_texts, index.search, threading.Event()
    monkeypatch.setattr(
        index.index.model,
        "encode_texts",
        lambda texts: (batches.append(sorted(texts)), encode(texts))[1],
    )
    monkeypatch.setattr(
        index,
        "search",
        lambda *arguments: (searches.append(arguments[0].text), search(*arguments))[1],
    )
    service = SearchService([index], ServerLimits(), ServerMetrics())
    texts = ["a red circle", "a star", "a red circle", "a blue square -star", "zzz qqq"]

    async def search_all():
        service._model_thread.submit(started.wait, 60)
        searching = [
            asyncio.ensure_future(service.search(0, QueryKey(text), NO_FILTER, 5)) for text in texts
        ]
        await asyncio.sleep(0)
        started.set()
        return await asyncio.gather(*searching, return_exceptions=True)

    *results, failed = asyncio.run(search_all())
    service.close()
    assert batches == [["a blue square", "a red circle", "a star", "star"]]
    assert searches == ["a red circle", "a star", "a blue square -star", "zzz qqq"]
    assert isinstance(failed, VisavisError) and "zzz" in str(failed)
    for text, result in zip(texts[:2], results[:2], strict=True):
        expected = search_collection(index.index, SearchQuery.from_text(text), 120)
        assert [hit.key for hit in result] == [hit.key for hit in expected]
        assert [hit.score for hit in result] == pytest.approx([hit.score for hit in expected])


def test_search_last_page_has_no_more(shared_client):
    side = shared_client.get("/api/search", params={"text": "a star", "limit": 100}).json()[
        "sides"
    ][0]
    assert not side["has_more"]
    shown = {key for hit in side["hits"] for key in (hit["key"], *hit["duplicates"])}
    assert len(shown) == shared_client.get("/health").json()["items"]


def test_search_empty_query_returns_newest(shared_client):
    days = [hit["modified"] for hit in hits(shared_client)]
    assert days == sorted(days, reverse=True)
    assert all(hit["score"] is None for hit in hits(shared_client))


def test_start_page_groups_as_searches(shared_client, collection):
    found = hits(shared_client, limit=100)
    pages = hits(shared_client, limit=20) + hits(shared_client, limit=80, offset=20)
    assert pages == found
    keys = [hit["key"] for hit in found]
    copies = [key for hit in found for key in hit["duplicates"]]
    items = collection.index.store.get(keys + copies)
    assert len(items) == len(keys + copies) == collection.count
    assert copies, "the collection has near-duplicates"
    shown = [SearchResult(items[key], 0.0) for key in keys]
    again = grouped_results(collection.index, lambda _: (shown, False), len(shown))
    assert [result.key for result in again] == keys


def test_served_index_notices_an_update_while_it_is_opened(index_folder, tmp_path):
    folder = shutil.copytree(index_folder, tmp_path / "index")
    index = open_index(folder)
    assert ServedIndex(index).newer() is None
    # The items stay, and their probabilities change.
    write_manifest(folder, replace(index.manifest, calibration=None, exclude=("other",)))
    served = ServedIndex(index)
    newer = served.newer()
    assert newer is not None
    assert newer.version != served.version
    assert newer.newer() is None
    for each in (newer, served):
        each.index.close()


@pytest.mark.parametrize("hours", [-1, 1])
def test_index_with_other_file_times_is_read_once(index_folder, tmp_path, monkeypatch, hours):
    folder = shutil.copytree(index_folder, tmp_path / "index")
    served = ServedIndex(open_index(folder))
    for path in folder.iterdir():
        os.utime(path, (time.time() + 3600 * hours,) * 2)
    read = []
    module = "visavis.retrieval.server.search_service"
    monkeypatch.setattr(
        f"{module}.read_manifest", lambda path: read.append(path) or read_manifest(path)
    )
    for _ in range(3):
        assert served.newer() is None
    assert len(read) == 1
    served.index.close()


def test_update_is_opened_again_after_an_error(index_folder, tmp_path, monkeypatch, caplog):
    folder = shutil.copytree(index_folder, tmp_path / "index")
    index = open_index(folder)
    served = ServedIndex(index)
    write_manifest(folder, replace(index.manifest, calibration=None, exclude=("other",)))
    opened = list[float]()

    def fail_at_first(*arguments, **options):
        opened.append(time.monotonic())
        if len(opened) < 4:
            raise OSError("the drive is busy")
        return open_index(*arguments, **options)

    monkeypatch.setattr("visavis.retrieval.server.search_service.open_index", fail_at_first)
    service = SearchService([served], ServerLimits(), ServerMetrics())

    async def follow():
        following = asyncio.ensure_future(service.follow_updates(0.05))
        while service.indexes[0] is served:
            await asyncio.sleep(0.01)
        following.cancel()

    asyncio.run(asyncio.wait_for(follow(), 60))
    service.close()
    service.indexes[0].index.close()
    assert len(opened) == 4
    assert opened[3] - opened[2] > 0.2, "each time, it waits twice as long"
    assert caplog.text.count("the drive is busy") == 1


@pytest.mark.slow
def test_server_opens_each_update_and_serves_former_images(runs, tmp_path):
    """Images of former results: moved, replaced by another photo, removed."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, color in enumerate(COLORS):
        photo(color, SHAPES[number % 3]).save(photos / f"{color}.png")
    folder = visavis.index(runs[0], photos, out=tmp_path / "index").folder
    with TestClient(create_app([ServedIndex(open_index(folder))]), "http://localhost") as client:
        before = {hit["key"]: hit for hit in hits(client, text="a red star")}
        [version] = [index["version"] for index in client.get("/api/info").json()["indexes"]]

        def thumbnail(key):
            values = {"key": key, "content_version": before[key]["content_version"]}
            return client.get("/api/thumbnail", params=values)

        images = {key: thumbnail(key).content for key in before}
        (photos / "new").mkdir()
        (photos / "red.png").rename(photos / "new" / "red.png")
        (photos / "blue.png").unlink()
        (photos / "green.png").rename(photos / "blue.png")
        side = client.get("/api/search", params={"text": "a red star"}).json()["sides"][0]
        assert side["missing"] == 2
        assert {hit["key"] for hit in side["hits"]} == before.keys() - {"red.png", "green.png"}
        visavis.index(runs[0], photos, out=folder)
        deadline = time.monotonic() + 30
        while client.get("/api/info").json()["indexes"][0]["version"] == version:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        after = {hit["key"] for hit in hits(client, text="a red star")}
        assert after == before.keys() - {"red.png", "green.png"} | {"new/red.png"}
        assert client.get("/health").json()["items"] == 5
        for key in before.keys() - {"blue.png"}:
            assert thumbnail(key).content == images[key]
        assert thumbnail("blue.png").status_code == 200, "it is cached"
        moved = hits(client, like="new/red.png")[0]
        assert moved["key"] == "new/red.png"


def test_search_filters(shared_client):
    assert {
        hit["path"].split("/")[0] for hit in hits(shared_client, text="a star", path="trips")
    } == {"trips"}
    assert [
        hit["path"]
        for hit in hits(shared_client, path="*/0?.png", since="2020-09-13", until="2020-09-14")
    ] == [
        "trips/01.png",
        "home/kitchen/00.png",
    ]
    assert hits(shared_client, text="a star", kind="video") == []


def test_search_excluded_words_change_results(shared_client):
    plain, without = (
        [hit["key"] for hit in hits(shared_client, text=text)]
        for text in ("a red star", "a red star -circle")
    )
    assert plain != without


def test_search_like_ranks_item_first(shared_client):
    assert hits(shared_client, like="trips/01.png")[0]["key"] == "trips/01.png"


def test_search_by_image_finds_it_on_every_page(shared_client, collection_folder):
    response = shared_client.post(
        "/api/search",
        params={"limit": 5},
        content=(collection_folder / "trips" / "01.png").read_bytes(),
    )
    assert response.status_code == 200
    first = response.json()
    assert first["sides"][0]["hits"][0]["score"] == pytest.approx(1, abs=1e-3)
    again = hits(shared_client, image=first["query"]["image"], limit=5)
    assert again == first["sides"][0]["hits"]


def test_search_by_image_and_text(shared_client, collection_folder):
    content = (collection_folder / "trips" / "01.png").read_bytes()
    alone, both = (
        shared_client.post("/api/search", params=words, content=content).json()
        for words in ({}, {"text": "blue star"})
    )
    assert [hit["key"] for hit in alone["sides"][0]["hits"]] != [
        hit["key"] for hit in both["sides"][0]["hits"]
    ]


def test_search_rejects_unknown_image(shared_client):
    assert "Send it again" in error_of(
        shared_client.get("/api/search", params={"image": "0" * 64}), 404
    )


def test_images_have_no_metadata(shared_client):
    for size in ("thumbnail", "image"):
        response = shared_client.get(f"/api/{size}", params={"key": "place.jpg"})
        assert response.headers["content-type"] == "image/jpeg"
        with Image.open(io.BytesIO(response.content)) as shown:
            assert not shown.getexif()
            assert shown.info.keys() <= {
                "jfif",
                "jfif_version",
                "jfif_unit",
                "jfif_density",
                "progressive",
                "progression",
            }
            assert shown.height > shown.width, "the image must be upright"
        assert b"Secret" not in response.content
        assert b"GPS" not in response.content


def test_thumbnail_of_animation_is_first_frame(shared_client):
    with Image.open(
        io.BytesIO(shared_client.get("/api/thumbnail", params={"key": "animated.gif"}).content)
    ) as shown:
        red, green, blue = shown.convert("RGB").getpixel((24, 34))
    assert (red > 200, max(green, blue) < 100) == (True, True)


def test_images_are_cacheable_with_content_version(shared_client):
    key = "trips/01.png"
    assert (
        "immutable"
        in shared_client.get("/api/thumbnail", params={"key": key, "content_version": "a"}).headers[
            "cache-control"
        ]
    )
    assert (
        "no-cache"
        in shared_client.get("/api/thumbnail", params={"key": key}).headers["cache-control"]
    )
    assert shared_client.get("/api/search").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "key",
    [
        "../outside.png",
        "/etc/passwd",
        "trips/../../outside.png",
        "..%2Foutside.png",
        "trips/01.png\0",
        "trips\\01.png",
        "",
        "a" * 4000,
    ],
)
def test_images_reject_unknown_keys(shared_client, key):
    for size in ("thumbnail", "image"):
        assert "expected the key of an item" in error_of(
            shared_client.get(f"/api/{size}", params={"key": key}), 404
        )


def test_images_reject_links_outside_source(shared_client):
    assert "points outside" in error_of(
        shared_client.get("/api/thumbnail", params={"key": "leaves.png"}), 404
    )


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/app.js",
        "/page/app.js",
        "/login.html",
        "/index.html",
        "/app.js/",
    ],
)
def test_web_ui_serves_no_other_files(shared_client, path):
    assert shared_client.get(path, follow_redirects=False).status_code in (404, 307)


def test_search_returns_markup_as_text(shared_client):
    response = shared_client.get("/api/search", params={"path": "onerror"})
    assert response.headers["content-type"] == "application/json"
    assert response.json()["sides"][0]["hits"][0]["name"] == MARKUP


def test_search_reports_results_beyond_its_limit(collection):
    with TestClient(
        create_app([collection], limits=ServerLimits(max_results=20)), base_url="http://localhost"
    ) as client:
        for offset, limit, has_more, is_cut in (
            (0, 15, True, False),
            (15, 5, False, True),
            (15, 15, False, False),
        ):
            side = client.get("/api/search", params={"offset": offset, "limit": limit}).json()[
                "sides"
            ][0]
            assert (side["has_more"], side["is_cut"]) == (has_more, is_cut)


def test_search_ignores_excluded_unknown_words(shared_client):
    expected = [hit["key"] for hit in hits(shared_client, text="a red star")]
    for excluded in ("-blorp", '-"blorp flurb"', "-blorp -flurb"):
        assert [
            hit["key"] for hit in hits(shared_client, text=f"a red star {excluded}")
        ] == expected
    partly = [hit["score"] for hit in hits(shared_client, text='a red star -"blorp circle"')]
    assert partly != [hit["score"] for hit in hits(shared_client, text="a red star")]
    for text, problem in (
        ("-blorp", "only exclusions"),
        ("blorp", "unknown words only"),
        ("blorp -circle", "unknown words only"),
    ):
        assert problem in error_of(shared_client.get("/api/search", params={"text": text}), 400)


def test_search_names_unknown_words(shared_client):
    (side,) = shared_client.get("/api/search", params={"text": "a red zzz -qwer"}).json()["sides"]
    assert side["unknown_words"] == ["zzz", "qwer"]
    (side,) = shared_client.get("/api/search", params={"text": "a red star"}).json()["sides"]
    assert side["unknown_words"] == []


@pytest.mark.slow
def test_videos_of_a_loopback_server_are_sent_in_ranges(runs, tmp_path):
    (tmp_path / "clips").mkdir()
    frames = [np.full((64, 64, 3), number, np.uint8) for number in range(30)]
    content = write_video(tmp_path / "clips" / "a.mp4", frames).read_bytes()
    photo().save(tmp_path / "clips" / "b.png")
    folder = visavis.index(runs[0], tmp_path / "clips", out=tmp_path / "index").folder
    with TestClient(create_app([ServedIndex(open_index(folder))]), "http://localhost") as client:
        assert client.get("/api/info").json()["videos"]
        items = {hit["key"]: hit for hit in hits(client)}
        (key,) = (key for key, hit in items.items() if hit["kind"] != "image")
        whole = client.get("/api/video", params={"key": key})
        assert (whole.content, whole.headers["content-type"]) == (content, "video/mp4")
        part = client.get("/api/video", params={"key": key}, headers={"range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, content[10:20])
        assert part.headers["content-range"] == f"bytes 10-19/{len(content)}"
        far = client.get("/api/video", params={"key": key}, headers={"range": "bytes=9999999-"})
        assert far.status_code == 416
        assert client.get("/api/video", params={"key": "b.png"}).status_code == 404
        (tmp_path / "other.mp4").write_bytes(content)
        (tmp_path / "clips" / "a.mp4").unlink()
        (tmp_path / "clips" / "a.mp4").symlink_to(tmp_path / "other.mp4")
        assert client.get("/api/video", params={"key": key}).status_code == 404, "a link outside"
    for options in ({"bound_to": None}, {"host_names": ["photos.example"]}):
        app = create_app([ServedIndex(open_index(folder))], **options)
        with TestClient(app, "http://localhost") as client:
            assert not client.get("/api/info").json()["videos"]
            assert client.get("/api/video", params={"key": key}).status_code == 409


@pytest.mark.parametrize("text", ["", "a red star"])
def test_search_names_known_metadata(shared_client, text):
    message = error_of(
        shared_client.get("/api/search", params={"text": text, "tag": "hue=red"}), 400
    )
    assert (
        message
        == "metadata: expected no filter, because the items have no metadata, got 'hue'. Remove the filter."
    )


@pytest.mark.parametrize(
    "text",
    [
        "東京 🌸",
        "\u202edlrow",
        "é" * 500,
        "<script>",
        "'; DROP TABLE",
        "-",
        '-"',
        'a -"',
        "%00",
        "٣",
    ],
)
def test_search_accepts_unusual_text(shared_client, text):
    response = shared_client.get("/api/search", params={"text": text})
    assert response.status_code == 200 or "unknown words only" in error_of(response, 400)


@pytest.mark.parametrize(
    ("params", "status", "text"),
    [
        ({"text": "a" * 501}, 422, "text: expected at most 500 characters"),
        ({"text": "a\0b"}, 422, "control characters"),
        ({"text": "-red"}, 400, "only exclusions"),
        ({"like": "nothing.png"}, 400, "expected the key of an item"),
        ({"txet": "a"}, 422, "txet"),
        ({"limit": 0}, 422, "limit"),
        ({"offset": 10**9}, 422, "offset"),
        ({"since": "yesterday"}, 422, "since"),
        ({"tag": "no equals sign"}, 422, "tag"),
        ({"kind": "sound"}, 422, "kind"),
    ],
)
def test_search_rejects_invalid_parameters(shared_client, params, status, text):
    assert text in error_of(shared_client.get("/api/search", params=params), status)


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "got an empty body"),
        (b"hello", "image of the query is not an image of a known format"),
        (photos.png_bomb(31_623, 31_623), "pixels"),
        (photos.png_bomb(7_000, 7_000), "pixels"),
        (png(photo())[:100], "truncated"),
        (photo_with_exif(photo())[:700], "truncated"),
        (
            b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
            "not an image",
        ),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (b"GIF89a" + b"\xff" * 50, "damaged"),
    ],
    ids=[
        "empty",
        "text",
        "a billion pixels",
        "49 million pixels",
        "cut png",
        "cut jpeg",
        "svg",
        "postscript",
        "damaged gif",
    ],
)
def test_search_by_image_rejects_other_content(shared_client, content, text):
    assert text in error_of(shared_client.post("/api/search", content=content), 400)


def test_search_by_image_accepts_polyglot_file(shared_client):
    polyglot = png(photo()) + b"<script>alert(1)</script>PK\3\4"
    assert (
        shared_client.post(
            "/api/search", content=polyglot, headers={"content-type": "text/html"}
        ).status_code
        == 200
    )


def test_requests_have_a_size_limit(client):
    large = b"\0" * (ServerLimits().max_body_bytes + 1)
    assert "larger than 8 MB" in error_of(client.post("/api/search", content=large), 413)
    assert "larger than 8 MB" in error_of(
        client.post("/api/search", content=iter([large[: 2**20]] * 9)), 413
    )
    assert "larger" in error_of(client.post("/api/votes", content=iter([large])), 413)


def test_responses_have_security_headers(shared_client):
    for path in (
        "/",
        "/app.js",
        "/api/search",
        "/api/thumbnail",
        "/nothing",
        "/health",
        "/api/search?limit=0",
    ):
        assert (
            SECURITY_HEADERS.items()
            <= {
                name.title().replace("Csp", "CSP"): value
                for name, value in shared_client.get(path).headers.items()
            }.items()
        )
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "http" not in policy


def test_web_ui_has_no_inline_or_external_code(shared_client):
    import re

    for name in ("/", "/app.js", "/style.css"):
        text = shared_client.get(name).text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    html = shared_client.get("/").text
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|innerHTML", html)
    for module in ("app", "api", "results", "detail", "voting", "feedback", "query", "format"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(",
            shared_client.get(f"/{module}.js").text,
        )


def test_web_ui_files_have_etags(shared_client):
    tag = shared_client.get("/app.js").headers["etag"]
    assert shared_client.get("/app.js", headers={"if-none-match": tag}).status_code == 304


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "evil.example:8000",
        "[::1",
        "a b",
    ],
)
def test_loopback_rejects_foreign_host_header(shared_client, host):
    assert "another host" in error_of(shared_client.get("/api/info", headers={"host": host}), 403)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "127.1.2.3"]
)
def test_loopback_accepts_every_loopback_name(shared_client, host):
    assert shared_client.get("/api/info", headers={"host": host}).status_code == 200


def test_votes_reject_cross_origin_requests(client):
    vote = {"query": {"text": "a star"}, "key": "trips/01.png", "relevant": True}
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://localhost:1"},
    ):
        assert "another site" in error_of(
            client.post("/api/votes", json=vote, headers=headers), 403
        )
    assert (
        client.post(
            "/api/votes",
            json=vote,
            headers={"origin": "http://localhost", "sec-fetch-site": "same-origin"},
        ).status_code
        == 200
    )


def test_token_is_required_in_header_or_cookie(collection):
    token = "a-long-enough-token"
    with TestClient(
        create_app([collection], bound_to=None, token=token), base_url="http://photos.example"
    ) as client:
        for path in (
            "/api/search",
            "/metrics",
            "/app.js",
            "/openapi.json",
            "/api/image?key=trips/01.png",
        ):
            response = client.get(path)
            assert "token" in error_of(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
            assert (
                client.get(path, headers={"authorization": "Bearer " + token[:-1]}).status_code
                == 401
            )
            assert client.get(path, headers={"authorization": "Bearer " + token}).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/", follow_redirects=False).headers["location"] == "login"
        assert client.post("/login", data={"token": "wrong"}).status_code == 401
        assert "cookie" not in client.post("/login", data={"token": "wrong"}).headers.get(
            "set-cookie", ""
        )
        logged_in = client.post("/login", data={"token": token}, follow_redirects=False)
        assert {"HttpOnly", "SameSite=strict"} <= set(logged_in.headers["set-cookie"].split("; "))
        assert token not in logged_in.headers["set-cookie"]
        assert client.get("/api/search").status_code == 200
        assert client.get("/").status_code == 200


def test_rate_limit_returns_retry_after(collection):
    app = create_app(
        [collection],
        bound_to=None,
        token="a-long-enough-token",
        rates=RateLimits(burst=20, per_s=0.5),
    )
    with TestClient(
        app,
        base_url="http://photos.example",
        headers={"authorization": "Bearer a-long-enough-token"},
    ) as client:
        responses = [client.get("/api/search") for _ in range(4)]
        assert [response.status_code for response in responses] == [200, 200, 429, 429]
        assert "Too many requests" in error_of(responses[-1], 429)
        assert 1 <= int(responses[-1].headers["retry-after"]) <= 16


def test_search_returns_named_items_on_the_first_page(shared_client):
    """Also by words that the model does not know."""
    for text, key in (("place", "place.jpg"), ("東京", "späte Blüte 東京 🌸.png")):
        response = shared_client.get("/api/search", params={"text": text, "limit": 3})
        [side] = response.json()["sides"]
        [hit] = side["named"]
        assert (hit["key"], hit["found_by"], hit["text"], hit["score"]) == (key, "name", key, None)
        assert side["unknown_words"]
        later = shared_client.get("/api/search", params={"text": text, "limit": 3, "offset": 3})
        assert later.json()["sides"][0]["named"] == []


def test_votes_are_saved_shown_and_withdrawn(client, index_folder):
    query = {"text": "a red star"}
    first = hits(client, **query)[0]
    vote = {"query": query, "key": first["key"], "relevant": True}
    saved = client.post("/api/votes", json=vote).json()
    assert saved == {"relevant": True, "vote": saved["vote"]}
    assert hits(client, **query)[0]["vote"] is True
    assert hits(client, text="a blue star -circle")[0]["vote"] is None
    client.post("/api/votes", json=vote | {"relevant": None})
    assert hits(client, **query)[0]["vote"] is None
    lines = read_feedback(index_folder)
    assert [line.relevant for line in lines] == [True, None]
    assert (lines[0].index, lines[0].item, lines[0].query) == (
        "one",
        first["key"],
        QueryKey("a red star"),
    )


def test_undo_removes_the_named_vote_only(client, index_folder):
    """Two clients vote on one item. The second has not seen the vote of the first, and undoes its
    own.
    """
    query = {"text": "a red star"}
    vote = {"query": query, "key": hits(client, **query)[0]["key"]}
    first, second = (
        client.post("/api/votes", json=vote | {"relevant": value}).json() for value in (True, False)
    )
    assert client.post("/api/votes/undo", json={"vote": second["vote"]}).json() == {
        "relevant": True
    }
    assert hits(client, **query)[0]["vote"] is True
    assert [
        judgment.relevant for judgment in latest_judgments(read_feedback(index_folder)).values()
    ] == [True]
    for name in (second["vote"], "unknown", "\ud800"):
        response = client.post(
            "/api/votes/undo",
            content=json.dumps({"vote": name}),
            headers={"content-type": "application/json"},
        )
        assert error_of(response, 404 if name != "\ud800" else 400).startswith("vote: ")
    assert client.post("/api/votes/undo", json={"vote": first["vote"]}).json() == {"relevant": None}
    assert hits(client, **query)[0]["vote"] is None


@pytest.mark.parametrize("values", list(itertools.product((True, False, None), repeat=3)))
def test_undo_in_any_order_leaves_the_last_other_vote(collection, values):
    """After each undo, server and feedback agree with the definition: the last vote that was not
    undone.
    """
    key, item = QueryKey("a star"), collection.index.items["trips/01.png"]
    folder = collection.index.folder
    store = VoteStore([folder], ServerMetrics())
    for order in itertools.permutations(range(len(values))):
        remove_votes(folder)
        names = [store.record_vote("one", key, item, value).vote for value in values]
        remaining = list(range(len(values)))
        for number in order:
            remaining.remove(number)
            expected = values[remaining[-1]] if remaining else None
            assert store.undo(names[number]) is expected
            assert store.of_query(0, key).get(item.key) is expected
            last = latest_judgments(read_feedback(folder)).get((key, item.key))
            assert (last and last.relevant) is expected
            assert len(read_feedback(folder)) == len(remaining)


def test_two_servers_show_the_votes_of_each_other(index_folder):
    remove_votes(index_folder)
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                TestClient(
                    create_app([ServedIndex(open_index(index_folder))], saves_votes=True),
                    base_url="http://localhost",
                )
            )
            for _ in range(2)
        )
        query = {"text": "a red star"}
        # Both servers have cached results of the query.
        key = hits(first, **query)[0]["key"]
        assert hits(second, **query)[0]["key"] == key
        vote = {"query": query, "key": key, "relevant": False}
        saved = first.post("/api/votes", json=vote).json()
        assert hits(second, **query)[0]["vote"] is False
        undone = second.post("/api/votes/undo", json={"vote": saved["vote"]}).json()
        assert undone == {"relevant": None}
        assert hits(first, **query)[0]["vote"] is None
        assert read_feedback(index_folder) == []


def test_votes_of_a_comparison_are_in_both_indexes(indexes, collection, other_collection):
    for folder in indexes:
        remove_votes(folder)
    app = create_app([collection, other_collection], saves_votes=True)
    with TestClient(app, base_url="http://localhost") as client:
        query = {"text": "a red star"}
        vote = {"query": query, "index": 1, "key": "trips/01.png", "relevant": True}
        saved = client.post("/api/votes", json=vote).json()
        client.post("/api/preferences", json={"query": query, "preferred": "left"})
        one, two = map(read_feedback, indexes)
        assert one == two
        assert [line.kind for line in one] == ["judgment", "preference"]
        client.post("/api/votes/undo", json={"vote": saved["vote"]})
        assert [len(read_feedback(folder)) for folder in indexes] == [1, 1]


def test_votes_require_permission_query_and_item(client, collection):
    vote = {"query": {"text": "a star"}, "key": "trips/01.png", "relevant": True}
    assert "expected the key of an item" in error_of(
        client.post("/api/votes", json=vote | {"key": "none"}), 404
    )
    bodies = {
        b"{": 422,
        b'{"key": }': 422,
        b"": 422,
        b"query=a": 422,
        b"null": 422,
        b"\xff": 400,
        b"[" * 100_000: 400,
    }
    for body, status in bodies.items():
        response = client.post(
            "/api/votes", content=body, headers={"content-type": "application/json"}
        )
        assert error_of(response, status).startswith("body: expected ")
    assert "empty query" in error_of(client.post("/api/votes", json=vote | {"query": {}}), 422)
    halved = '{"query":{"text":"\\ud800"},"key":"a","relevant":true}'
    assert "text" in error_of(
        client.post("/api/votes", content=halved, headers={"content-type": "application/json"}), 400
    )
    assert "expected 0, got 1" in error_of(client.post("/api/votes", json=vote | {"index": 1}), 404)
    with TestClient(create_app([collection]), base_url="http://localhost") as without_votes:
        assert "--votes" in error_of(without_votes.post("/api/votes", json=vote), 409)


def test_comparison_is_blind_until_a_preference(indexes, collection, other_collection):
    remove_votes(indexes[0])
    app = create_app([collection, other_collection], saves_votes=True)
    with TestClient(app, base_url="http://localhost") as client:
        order = {}
        for number in range(24):
            response = client.get(
                "/api/search", params={"text": f"star {number}", "limit": 3}
            ).json()
            assert [side["side"] for side in response["sides"]] == ["left", "right"]
            assert not {"one", "two"} & set(json.dumps(response).split('"')), (
                "a response must not contain the names"
            )
            names = client.post(
                "/api/preferences",
                json={"query": {"text": f"star {number}"}, "preferred": "left"},
            ).json()
            order[response["sides"][0]["index"], names["left"]] = True
            again = client.get("/api/search", params={"text": f"star {number}", "limit": 3}).json()
            assert [side["index"] for side in again["sides"]] == [
                side["index"] for side in response["sides"]
            ]
        assert len(order) == 2, "each index must have a fixed number and a random side"
    lines = read_feedback(indexes[0])
    assert {line.preferred for line in lines} == {"one", "two"}
    assert all(line.preferred == line.left for line in lines)


def test_preferences_require_two_indexes(shared_client):
    assert "need two indexes" in error_of(
        shared_client.post("/api/preferences", json={"query": {"text": "a"}, "preferred": "left"}),
        409,
    )


def test_create_app_rejects_equal_names(collection):
    with pytest.raises(VisavisError, match="'one' twice"):
        create_app([collection, collection])


def test_uncertain_pairs_have_no_vote(client):
    assert client.get("/api/uncertain").json() == {"pairs": []}
    for text in ("a", "a red", "a red star", "blue circle"):
        hits(client, text=text)
    pairs = client.get("/api/uncertain").json()["pairs"]
    assert {pair["query"]["text"] for pair in pairs} == {"a red star", "blue circle"}, (
        "prefixes of a later query are dropped"
    )
    first = pairs[0]
    client.post(
        "/api/votes",
        json={
            "query": first["query"],
            "index": first["index"],
            "key": first["hit"]["key"],
            "relevant": False,
        },
    )
    remaining = client.get("/api/uncertain").json()["pairs"]
    assert (first["query"], first["hit"]["key"]) not in [
        (pair["query"], pair["hit"]["key"]) for pair in remaining
    ]


def test_health_metrics_and_facets(client):
    hits(client, text="a star")
    assert client.get("/health").json() == {"status": "ok", "items": 65}
    metrics = client.get("/metrics").text
    assert 'visavis_requests_total{method="GET",route="/api/search",status="200"} 1.0' in metrics
    assert 'visavis_items{index="one"} 65.0' in metrics
    facets = client.get("/api/facets").json()
    assert facets["kinds"] == {"image": 65}
    assert facets["folders"] == {"trips": 30, "home/kitchen": 30}
    assert facets["years"]["2020"] == 60


def test_docs_page_is_served_offline(shared_client):
    page = shared_client.get("/docs")
    assert page.status_code == 200
    assert "docs.js" in page.text
    assert "://" not in page.text.replace("http://www.w3.org", "")
    assert "/docs" in error_of(shared_client.get("/api/nothing"), 404)


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("/data/runs/holidays", "holidays"),
        ("/data/runs/holidays/model", "holidays"),
        ("openai/clip-vit-base-patch32", "openai/clip-vit-base-patch32"),
        ("/cache/hub/models--openai--clip/snapshots/0123abcd", "openai/clip"),
    ],
)
@posix
def test_api_name_of_a_model_is_that_of_its_run(collection, monkeypatch, location, name):
    manifest = replace(collection.index.manifest, model=location)
    monkeypatch.setattr(collection.index, "manifest", manifest)
    assert collection.model_name == name


def test_openapi_lists_every_route(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        *(
            f"/api/{name}"
            for name in [
                "search",
                "thumbnail",
                "image",
                "video",
                "info",
                "facets",
                "votes",
                "votes/undo",
                "preferences",
                "uncertain",
            ]
        ),
        *(f"/v1/{name}" for name in ["embeddings", "models", "models/{name}", "rerank"]),
        "/health",
        "/metrics",
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("examples", [3, pytest.param(150, marks=pytest.mark.long)])
def test_openapi_requests_cause_no_server_error(collection, examples):
    """Valid and invalid requests generated from the OpenAPI description, for every route."""
    schemathesis = pytest.importorskip(
        "schemathesis", reason="schemathesis is not installed: pip install 'visavis[dev]'"
    )
    from schemathesis import checks

    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    statuses = []
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", create_app([collection], saves_votes=True), headers={"host": "localhost"}
    )
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings
        @hypothesis.given(case=operation.as_strategy())
        def send(case):
            response = case.call_and_validate(
                headers={"host": "localhost"}, checks=(checks.not_a_server_error,)
            )
            statuses.append((case.operation.label, response.status_code))

        send()
    assert len({label for label, _ in statuses}) == 17
    assert {200, 422} <= {status for _, status in statuses}
