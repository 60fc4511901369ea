"""The service by its routes: what it finds, what it shows, what it keeps, and what it refuses, each in one sentence."""

from __future__ import annotations

import io
import json
import struct
import zlib

import hypothesis
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from visavis.data.judgements import open_judgements, read_judgements
from visavis.errors import VisavisError
from visavis.serving.application import make_app
from visavis.serving.guard import HEADERS
from visavis.serving.limits import Limits, Rates

from .conftest import MARKUP, photo, with_place


def hits(client, **params):
    answer = client.get("/api/search", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()["sides"][0]["hits"]


def refused(answer, status):
    """The one sentence of a refusal."""
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    sentence = answer.json()["error"]
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def png(picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def test_a_query_finds_what_the_index_finds_and_pages_go_on(client, collection):
    from visavis.retrieval.searching import Query, search

    first = hits(client, text="a red circle", limit=20)
    second = hits(client, text="a red circle", limit=20, offset=20)
    expected = search(collection.index, Query.of("a red circle"), 120).hits
    assert [hit["key"] for hit in first + second] == [hit.item.key for hit in expected[:40]]
    assert [hit["score"] for hit in first] == pytest.approx([hit.score for hit in expected[:20]])


def test_the_last_page_says_that_there_is_no_more(client):
    side = client.get("/api/search", params={"text": "a star", "limit": 100}).json()["sides"][0]
    assert not side["more"]
    shown = {key for hit in side["hits"] for key in (hit["key"], *hit["duplicates"])}
    assert len(shown) == client.get("/health").json()["items"]


def test_no_query_is_the_newest_first(client):
    days = [hit["changed"] for hit in hits(client)]
    assert days == sorted(days, reverse=True)
    assert all(hit["score"] is None for hit in hits(client))


def test_filters_leave_only_what_passes_them(client):
    assert {hit["path"].split("/")[0] for hit in hits(client, text="a star", path="trips")} == {"trips"}
    assert [hit["path"] for hit in hits(client, path="*/0?.png", since="2020-09-13", until="2020-09-14")] == [
        "trips/01.png",
        "home/kitchen/00.png",
    ]
    assert hits(client, text="a star", kind="video") == []


def test_minus_words_move_the_results_away(client):
    plain, without = ([hit["key"] for hit in hits(client, text=text)] for text in ("a red star", "a red star -circle"))
    assert plain != without


def test_more_like_this_begins_with_the_thing_itself(client):
    assert hits(client, like="trips/01.png")[0]["key"] == "trips/01.png"


def test_a_picture_that_was_posted_finds_itself_also_on_the_next_page(client, collection_folder):
    answer = client.post("/api/search", params={"limit": 5}, content=(collection_folder / "trips" / "01.png").read_bytes())
    assert answer.status_code == 200
    first = answer.json()
    assert first["sides"][0]["hits"][0]["score"] == pytest.approx(1, abs=1e-3)
    again = hits(client, picture=first["query"]["picture"], limit=5)
    assert again == first["sides"][0]["hits"]


def test_a_picture_and_words_are_both_looked_for(client, collection_folder):
    content = (collection_folder / "trips" / "01.png").read_bytes()
    alone, both = (client.post("/api/search", params=words, content=content).json() for words in ({}, {"text": "blue star"}))
    assert [hit["key"] for hit in alone["sides"][0]["hits"]] != [hit["key"] for hit in both["sides"][0]["hits"]]


def test_a_picture_nobody_sent_is_a_sentence(client):
    assert "send it again" in refused(client.get("/api/search", params={"picture": "0" * 64}), 404)


def test_place_camera_and_comment_never_leave(client):
    for how in ("thumbnail", "picture"):
        answer = client.get(f"/api/{how}", params={"key": "place.jpg"})
        assert answer.headers["content-type"] == "image/jpeg"
        with Image.open(io.BytesIO(answer.content)) as shown:
            assert not shown.getexif()
            assert shown.info.keys() <= {"jfif", "jfif_version", "jfif_unit", "jfif_density", "progressive", "progression"}
            assert shown.height > shown.width, "it is upright"
        assert b"Secret" not in answer.content
        assert b"GPS" not in answer.content


def test_an_animated_picture_shows_its_first_one(client):
    with Image.open(io.BytesIO(client.get("/api/thumbnail", params={"key": "animated.gif"}).content)) as shown:
        red, green, blue = shown.convert("RGB").getpixel((24, 34))
    assert (red > 200, max(green, blue) < 100) == (True, True)


def test_pictures_may_be_kept_only_where_their_version_is_named(client):
    key = "trips/01.png"
    assert "immutable" in client.get("/api/thumbnail", params={"key": key, "version": "a"}).headers["cache-control"]
    assert "no-cache" in client.get("/api/thumbnail", params={"key": key}).headers["cache-control"]
    assert client.get("/api/search").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "key",
    ["../outside.png", "/etc/passwd", "trips/../../outside.png", "..%2Foutside.png", "trips/01.png\0", "trips\\01.png", "", "a" * 4000],
)
def test_only_items_of_the_index_are_served(client, key):
    for how in ("thumbnail", "picture"):
        assert "no item" in refused(client.get(f"/api/{how}", params={"key": key}), 404)


def test_a_link_that_leads_out_by_now_is_not_followed(client):
    assert "leads out" in refused(client.get("/api/thumbnail", params={"key": "leaves.png"}), 404)


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/%2e%2e/app.js", "/page/app.js", "/login.html", "/index.html", "/app.js/", "/docs"])
def test_no_file_beside_the_page_is_served(client, path):
    assert client.get(path, follow_redirects=False).status_code in (404, 307)


def test_markup_in_names_is_text(client):
    answer = client.get("/api/search", params={"path": "onerror"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["sides"][0]["hits"][0]["name"] == MARKUP


@pytest.mark.parametrize("text", ["東京 🌸", "\u202edlrow", "é" * 500, "<script>", "'; DROP TABLE", "-", '-"', 'a -"', "%00", "٣"])
def test_odd_words_are_words_which_a_model_knows_or_not(client, text):
    answer = client.get("/api/search", params={"text": text})
    assert answer.status_code == 200 or "no word of" in refused(answer, 400)


@pytest.mark.parametrize(
    ("params", "status", "says"),
    [
        ({"text": "a" * 501}, 422, "text: string should have at most 500 characters"),
        ({"text": "a\0b"}, 422, "control characters"),
        ({"text": "-red"}, 400, "only what must not be there"),
        ({"like": "nothing.png"}, 400, "no item of the index"),
        ({"txet": "a"}, 422, "txet"),
        ({"limit": 0}, 422, "limit"),
        ({"offset": 10**9}, 422, "offset"),
        ({"since": "yesterday"}, 422, "since"),
        ({"tag": "no equals sign"}, 422, "tag"),
        ({"kind": "sound"}, 422, "kind"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(client, params, status, says):
    assert says in refused(client.get("/api/search", params=params), status)


def bomb(side):
    """A PNG that says it is so wide and high, and is a few bytes."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the picture is missing"),
        (b"hello", "not an image"),
        (bomb(31_623), "pixels"),
        (bomb(7_000), "pixels"),
        (png(photo())[:100], "truncated"),
        (with_place(photo())[:700], "truncated"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (b"GIF89a" + b"\xff" * 50, "damaged"),
    ],
    ids=["empty", "text", "a billion pixels", "49 million pixels", "cut png", "cut jpeg", "svg", "postscript", "damaged gif"],
)
def test_what_is_no_picture_is_a_sentence(client, content, says):
    assert says in refused(client.post("/api/search", content=content), 400)


def test_a_file_that_is_two_things_is_the_picture_alone(client):
    polyglot = png(photo()) + b"<script>alert(1)</script>PK\3\4"
    assert client.post("/api/search", content=polyglot, headers={"content-type": "text/html"}).status_code == 200


def test_more_than_the_limit_is_refused_whether_announced_or_not(client):
    large = b"\0" * (Limits().body_bytes + 1)
    assert "larger than 8 MB" in refused(client.post("/api/search", content=large), 413)
    assert "larger than 8 MB" in refused(client.post("/api/search", content=iter([large[: 2**20]] * 9)), 413)
    assert "larger" in refused(client.post("/api/votes", content=iter([large])), 413)


def test_every_answer_has_the_strict_headers(client):
    for path in ("/", "/app.js", "/api/search", "/api/thumbnail", "/nothing", "/health", "/api/search?limit=0"):
        assert HEADERS.items() <= {name.title().replace("Csp", "CSP"): value for name, value in client.get(path).headers.items()}.items()
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "http" not in policy


def test_the_page_holds_nothing_inline_and_nothing_from_elsewhere(client):
    import re

    for name in ("/", "/app.js", "/style.css"):
        text = client.get(name).text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    page = client.get("/").text
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|innerHTML", page)
    for module in ("app", "api", "tiles", "detail", "voting", "teaching", "query", "words"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", client.get(f"/{module}.js").text)


def test_the_page_is_sent_once(client):
    tag = client.get("/app.js").headers["etag"]
    assert client.get("/app.js", headers={"if-none-match": tag}).status_code == 304


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "evil.example:8000", "[::1", "a b"]
)
def test_another_host_is_refused_on_loopback(client, host):
    assert "another host" in refused(client.get("/api/about", headers={"host": host}), 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "127.1.2.3"])
def test_every_name_of_loopback_is_served(client, host):
    assert client.get("/api/about", headers={"host": host}).status_code == 200


def test_a_page_of_another_site_changes_nothing(client):
    vote = {"query": {"text": "a star"}, "key": "trips/01.png", "fits": True}
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://localhost:1"},
    ):
        assert "another site" in refused(client.post("/api/votes", json=vote, headers=headers), 403)
    assert client.post("/api/votes", json=vote, headers={"origin": "http://localhost", "sec-fetch-site": "same-origin"}).status_code == 200


def test_a_token_is_asked_for_in_a_header_or_as_a_cookie(collection):
    token = "a-long-enough-token"
    with TestClient(make_app([collection], bound_to=None, token=token), base_url="http://photos.example") as client:
        for path in ("/api/search", "/metrics", "/app.js", "/openapi.json", "/api/picture?key=trips/01.png"):
            answer = client.get(path)
            assert "token" in refused(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert client.get(path, headers={"authorization": "Bearer " + token[:-1]}).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer " + token}).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/", follow_redirects=False).headers["location"] == "/login"
        assert client.post("/login", data={"token": "wrong"}).status_code == 401
        assert "cookie" not in client.post("/login", data={"token": "wrong"}).headers.get("set-cookie", "")
        entered = client.post("/login", data={"token": token}, follow_redirects=False)
        assert {"HttpOnly", "SameSite=strict"} <= set(entered.headers["set-cookie"].split("; "))
        assert token not in entered.headers["set-cookie"]
        assert client.get("/api/search").status_code == 200
        assert client.get("/").status_code == 200


def test_too_many_requests_are_told_when_to_come_back(collection):
    app = make_app([collection], bound_to=None, token="a-long-enough-token", rates=Rates(at_once=20, per_s=0.5))
    with TestClient(app, base_url="http://photos.example", headers={"authorization": "Bearer a-long-enough-token"}) as client:
        answers = [client.get("/api/search") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
        assert "too many requests" in refused(answers[-1], 429)
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 16


def test_votes_are_kept_shown_and_taken_back(client, tmp_path):
    query = {"text": "a red star"}
    first = hits(client, **query)[0]
    vote = {"query": query, "key": first["key"], "fits": True}
    assert client.post("/api/votes", json=vote).json() == {"fits": True}
    assert hits(client, **query)[0]["vote"] is True
    assert hits(client, text="a blue star -circle")[0]["vote"] is None
    client.post("/api/votes", json=vote | {"fits": None})
    assert hits(client, **query)[0]["vote"] is None
    lines = [json.loads(line) for line in (tmp_path / "votes.jsonl").read_text().splitlines()]
    assert [line["fits"] for line in lines] == [True, None]
    assert lines[0]["item"] == first["key"]
    assert lines[0]["query"]["text"] == "a red star"


def test_votes_need_a_file_a_query_and_an_item(client, collection):
    vote = {"query": {"text": "a star"}, "key": "trips/01.png", "fits": True}
    assert "no item" in refused(client.post("/api/votes", json=vote | {"key": "none"}), 404)
    assert "empty query" in refused(client.post("/api/votes", json=vote | {"query": {}}), 422)
    halved = '{"query":{"text":"\\ud800"},"key":"a","fits":true}'
    assert "text" in refused(client.post("/api/votes", content=halved, headers={"content-type": "application/json"}), 422)
    assert "no index 1" in refused(client.post("/api/votes", json=vote | {"index": 1}), 404)
    with TestClient(make_app([collection]), base_url="http://localhost") as silent:
        assert "--judgements" in refused(silent.post("/api/votes", json=vote), 409)


def test_two_indexes_are_shown_by_lot_and_named_after_the_choice(collection, other_collection, tmp_path):
    with open_judgements(tmp_path / "votes.jsonl") as file:
        app = make_app([collection, other_collection], file)
        with TestClient(app, base_url="http://localhost") as client:
            order = {}
            for number in range(24):
                answer = client.get("/api/search", params={"text": f"star {number}", "limit": 3}).json()
                assert [side["side"] for side in answer["sides"]] == ["left", "right"]
                assert not {"one", "two"} & set(json.dumps(answer).split('"')), "an answer does not tell which is which"
                named = client.post("/api/choices", json={"query": {"text": f"star {number}"}, "prefers": "left"}).json()
                order[answer["sides"][0]["index"], named["left"]] = True
                again = client.get("/api/search", params={"text": f"star {number}", "limit": 3}).json()
                assert [side["index"] for side in again["sides"]] == [side["index"] for side in answer["sides"]]
            assert len(order) == 2, "each index has one number, and each was left at times"
        lines = read_judgements(tmp_path / "votes.jsonl")
        assert {line.preferred for line in lines} == {"one", "two"}
        assert all(line.preferred == line.left for line in lines)


def test_one_index_has_nothing_to_choose_from(client):
    assert "one index" in refused(client.post("/api/choices", json={"query": {"text": "a"}, "prefers": "left"}), 409)


def test_the_same_index_twice_is_a_sentence(collection):
    with pytest.raises(VisavisError, match="both indexes are called one"):
        make_app([collection, collection])
    with pytest.raises(VisavisError, match="3 indexes"):
        make_app([collection] * 3)


def test_what_is_asked_about_was_searched_for_and_not_judged_yet(client):
    assert client.get("/api/ask").json() == {"pairs": []}
    for text in ("a", "a red", "a red star", "blue circle"):
        hits(client, text=text)
    pairs = client.get("/api/ask").json()["pairs"]
    assert {pair["query"]["text"] for pair in pairs} == {"a red star", "blue circle"}, "what was only begun is no question"
    first = pairs[0]
    client.post("/api/votes", json={"query": first["query"], "index": first["index"], "key": first["hit"]["key"], "fits": False})
    left = client.get("/api/ask").json()["pairs"]
    assert (first["query"], first["hit"]["key"]) not in [(pair["query"], pair["hit"]["key"]) for pair in left]


def test_health_metrics_and_facets(client):
    hits(client, text="a star")
    assert client.get("/health").json() == {"status": "ok", "items": 65}
    figures = client.get("/metrics").text
    assert 'visavis_requests_total{method="GET",route="/api/search",status="200"} 1.0' in figures
    assert 'visavis_items{index="one"} 65.0' in figures
    facets = client.get("/api/facets").json()
    assert facets["kinds"] == {"image": 65}
    assert facets["folders"] == {"trips": 30, "home/kitchen": 30}
    assert facets["years"]["2020"] == 60


def test_openapi_names_every_route_and_no_page_comes_from_elsewhere(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        *(f"/api/{name}" for name in ["search", "thumbnail", "picture", "about", "facets", "votes", "choices", "ask"]),
        "/health",
        "/metrics",
    }
    assert client.get("/docs").status_code == 404


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("examples", [5, pytest.param(150, marks=pytest.mark.long)])
def test_nothing_that_the_description_allows_or_forbids_is_a_fault_of_the_service(collection, tmp_path, examples):
    """Requests made from the OpenAPI, right and wrong ones, for every route."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install 'visavis[dev]'")
    from schemathesis import checks

    settings = hypothesis.settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    asked = []
    with open_judgements(tmp_path / "votes.jsonl") as file:
        schema = schemathesis.openapi.from_asgi("/openapi.json", make_app([collection], file), headers={"host": "localhost"})
        for found in schema.get_all_operations():
            operation = found.ok()

            @settings
            @hypothesis.given(case=operation.as_strategy())
            def ask(case):
                answer = case.call_and_validate(headers={"host": "localhost"}, checks=(checks.not_a_server_error,))
                asked.append((case.operation.label, answer.status_code))

            ask()
    assert len({label for label, _ in asked}) == 11
    assert {200, 422} <= {status for _, status in asked}
