"""Embeddings and reranking: the official client of OpenAI, forms of images, scores and errors."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import re
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from tests.docs import read_blocks
from tests.processes import peak_memory

import visavis
from visavis.core.data_uris import is_data_url
from visavis.core.errors import VisavisError
from visavis.data.feedback.records import QueryKey
from visavis.retrieval.items import NO_FILTER
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection
from visavis.retrieval.server import mcp_server, schemas
from visavis.retrieval.server.application import create_app
from visavis.retrieval.server.image_cache import ImageCache
from visavis.retrieval.server.limits import LRUCache, RateLimits, ServerLimits, ServerMetrics
from visavis.retrieval.server.schemas import RequestModel
from visavis.retrieval.server.search_service import SearchService, ServedIndex

from .conftest import photo, photo_with_exif, served

openai = pytest.importorskip("openai", reason="the package openai is installed by make slow")
pytestmark = pytest.mark.slow

TEXTS = ["a red circle", "a star", "a large blue square left of a star"]
TOKEN = "a-long-enough-token"


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(content, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


RED, STAR = png(photo()), png(photo("blue", "star"))
JPEG = photo_with_exif(photo("green", "square", (160, 80)))


def official_client(http_client, **options):
    """The unchanged client of OpenAI, which sends its requests to an application."""
    settings = {"api_key": "none", "max_retries": 0, "base_url": f"{http_client.base_url}/v1"}
    return openai.OpenAI(http_client=http_client, **settings | options)


@pytest.fixture
def official(client):
    return official_client(client)


@pytest.fixture(scope="session")
def model(runs):
    return visavis.load(runs[0])


def vectors(response):
    assert [entry.index for entry in response.data] == list(range(len(response.data)))
    return torch.tensor([entry.embedding for entry in response.data])


def assert_equal(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_models_are_listed_and_found(official):
    (listed,) = official.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == ("one", "model", "visavis")
    assert official.models.retrieve("one") == listed
    with pytest.raises(openai.NotFoundError, match="expected one, got 'other'"):
        official.models.retrieve("other")


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"user": "me"}])
def test_embeddings_equal_encode_texts(official, model, options):
    """The client asks for base64, unless a format is given."""
    response = official.embeddings.create(model="one", input=TEXTS, **options)
    assert (response.object, response.model) == ("list", "one")
    assert_equal(vectors(response), model.encode_texts(TEXTS))
    single = official.embeddings.create(model="one", input=TEXTS[1], **options)
    assert_equal(vectors(single), model.encode_texts(TEXTS[1:2]))


def test_embeddings_as_base64_are_little_endian_float32(client, model):
    body = {"input": "a star", "encoding_format": "base64"}
    content = client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    found = np.frombuffer(base64.b64decode(content), "<f4")
    assert_equal(torch.from_numpy(found.copy()), model.encode_texts(["a star"])[0])


def test_usage_counts_tokens_that_were_read(official):
    """Three and two words, each with a start and an end. An image has no tokens."""
    inputs = ["a red circle", "a star", data_url(RED)]
    usage = official.embeddings.create(model="one", input=inputs).usage
    assert usage.prompt_tokens == usage.total_tokens == 5 + 4


def test_usage_of_clip_counts_tokens_after_the_cut(dual_encoders, tmp_path):
    for number, content in enumerate((RED, STAR)):
        (tmp_path / f"{number}.png").write_bytes(content)
    folder = visavis.index(dual_encoders / "clip", tmp_path, out=tmp_path / "index").folder
    model, texts = visavis.load(dual_encoders / "clip"), ["a red circle", "a red " * 60]
    with TestClient(create_app([ServedIndex(open_index(folder))]), "http://localhost") as client:
        official = official_client(client)
        response = official.embeddings.create(model="clip", input=[*texts, data_url(JPEG)])
    assert_equal(
        vectors(response), torch.cat([model.encode_texts(texts), model.encode_images([JPEG])])
    )
    read = model.processor.process_texts(texts)
    assert response.usage.prompt_tokens == int(read.mask.sum())


IMAGE_FORMS = {
    "data URL": {"input": data_url(JPEG, "jpeg")},
    "data URL with parameter": {"input": [data_url(JPEG, "jpeg;name=a.jpg")]},
    "Infinity": {"input": [data_url(JPEG, "jpeg")], "modality": "image"},
    "Jina, data URL": {"input": [{"image": data_url(JPEG)}]},
    "Jina, base64": {"input": [{"image": base64.b64encode(JPEG).decode()}]},
    "Jina, one": {"input": {"image": base64.b64encode(JPEG).decode()}},
    "vLLM": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": data_url(JPEG)}}],
            }
        ]
    },
}


@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_images_of_each_form_equal_encode_images(client, model, form):
    body = IMAGE_FORMS[form] | {"model": "one"}
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    (entry,) = response.json()["data"]
    assert_equal(torch.tensor([entry["embedding"]]), model.encode_images([JPEG]))


def test_texts_of_each_form_equal_encode_texts(client, model):
    parts = [{"type": "text", "text": "a star"}]
    for body in (
        {"input": [{"text": "a star"}]},
        {"input": "a star", "modality": "text"},
        {"messages": [{"role": "user", "content": "a star"}]},
        {"messages": [{"role": "user", "content": parts}]},
    ):
        (entry,) = client.post("/v1/embeddings", json=body).json()["data"]
        assert_equal(torch.tensor([entry["embedding"]]), model.encode_texts(["a star"]))


def test_long_mixed_lists_keep_their_order(official, model):
    colors = ("red", "green", "blue", "orange")
    texts = [
        f"a {colors[number % 4]} star{' and a circle' * (number % 3)}" for number in range(150)
    ]
    images = [png(photo("blue", "star", shift=number)) for number in range(6)]
    inputs = [*texts[:70], *map(data_url, images), *texts[70:]]
    found = vectors(official.embeddings.create(model="one", input=inputs))
    expected = model.encode_texts(texts)
    assert_equal(found[70:76], model.encode_images(images))
    assert_equal(torch.cat([found[:70], found[76:]]), expected)


def test_dimensions_shorten_vectors_of_matryoshka_models(other_collection, runs):
    model = visavis.load(runs[1])
    with TestClient(create_app([other_collection]), "http://localhost") as client:
        official = official_client(client)
        for dimensions in (8, 16):
            response = official.embeddings.create(model="two", input=TEXTS, dimensions=dimensions)
            expected = model.with_embedding_dim(dimensions).encode_texts(TEXTS)
            assert expected.shape == (3, dimensions)
            assert_equal(vectors(response), expected)
        with pytest.raises(openai.BadRequestError, match="expected 8 or 16") as caught:
            official.embeddings.create(model="two", input=TEXTS, dimensions=4)
    assert caught.value.param == "dimensions"


def test_two_indexes_serve_both_models(collection, other_collection, runs):
    with TestClient(create_app([collection, other_collection]), "http://localhost") as client:
        official = official_client(client)
        assert [entry.id for entry in official.models.list()] == ["one", "two"]
        for run in runs:
            response = official.embeddings.create(model=run.name, input=TEXTS)
            assert_equal(vectors(response), visavis.load(run).encode_texts(TEXTS))
        response = client.post("/v1/embeddings", json={"input": "a star"})
    assert "expected one or two, got none" in response.json()["error"]["message"]


MIXED = [{"type": "image_url", "image_url": {"url": data_url(RED)}}, {"type": "text", "text": "a"}]
INVALID = [
    ({"input": [1, 2]}, "input", "got token ids"),
    ({"input": [[1, 2], [3]]}, "input", "check_embedding_ctx_length=False"),
    ({"input": ["a star", 3]}, "input", "input[1]: expected texts, got token ids"),
    ({"input": []}, "input", "expected at least 1 item, got 0"),
    ({"input": ["a star"] * 2049}, "input", "expected at most 2048 items, got 2049"),
    ({"input": ["a star", " "]}, "input", "input[1]: expected text, got an empty text"),
    ({"input": "a" * 40_000}, "input", "at most 32,768 characters"),
    ({"input": "zzz qqq"}, None, "unknown words only"),
    ({"input": [{"image": "https://example.org/a.png"}]}, "input", "fetches no addresses"),
    ({"input": "http://a.b/c.png", "modality": "image"}, "input", "fetches no addresses"),
    ({"input": [{"image": "file:///etc/passwd"}]}, "input", "fetches no addresses"),
    ({"input": [{"image": "/etc/passwd"}]}, "input", "in base64"),
    ({"input": ["a star", data_url(b"no image")]}, None, "input[1] is not an image"),
    ({"input": [data_url(RED[:60])]}, None, "input[0] is truncated"),
    ({"input": {"image": data_url(RED), "text": "a"}}, "input", "one text or one image"),
    ({"input": {"audio": "a"}}, "input", "expected a text"),
    ({"messages": [{"role": "user", "content": MIXED}]}, "messages", "got 1 text and 1 image"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages", "image_url"),
    ({"messages": [{"role": "user"}]}, "messages", "or parts"),
    ({"input": "a star", "messages": []}, "messages", "expected one text or one image"),
    ({"messages": [{"content": [{"content": [{"content": "a"}]}]}]}, "messages", "or parts"),
    ({"input": {"content": "a", "image": data_url(RED)}}, "input", "got a part with 'image'"),
    ({"input": {"type": "text", "text": "a", "x": "b"}}, "input", "got a part with 'x'"),
    ({"input": {"content": [{"type": "audio", "text": "a"}]}}, "input", "got a part with 'text'"),
    (
        {"input": [{"content": [MIXED[0]] * 2}]},
        "input",
        "2 images. This model encodes texts and images separately. Send them as separate inputs",
    ),
    ({"input": ["a star", None]}, "input", "got null"),
    ({"input": None}, "input", "expected one of input and messages, got none"),
    ({"input": "https://example.com/a.jpg"}, "input", "fetches no addresses"),
    (
        {"input": ["a", " HTTP://a.b/c.PNG?x=1 "]},
        "input",
        "input[1]: expected a text or data:image",
    ),
    ({}, "input", "expected one of input and messages, got none"),
    ({"input": "a star", "dimensions": 3}, "dimensions", "expected 16"),
    ({"input": "a star", "dimensions": 0}, "dimensions", "an integer >= 1"),
    ({"input": "a star", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
]


@pytest.mark.parametrize(("body", "param", "text"), INVALID)
def test_invalid_requests_are_errors_in_the_form_of_openai(client, body, param, text):
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert text in error["message"]
    assert error["message"].endswith(".")
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


SPELLINGS = [
    "data:image/png;base64,", "data:application/octet-stream;base64,", "data:;base64,",
    "DATA:image/PNG;base64,", "  data:image/png;base64,", "\n\tdata:image/png;base64,",
    "data:image/png;BASE64,", "data:image/png;name=a b.png;base64,", "data:image/png;\tbase64 ,",
    "data: image/png;base64,", "Data:text/plain;Base64,",
]  # fmt: skip
DAMAGED = [
    "data:image/png,%89PNG", "data:image/png;base64", "data:,a star", "data:;,", "data:image/png",
    "data:image/svg+xml;utf8,<svg/>", "DATA:text/plain,a%20star", "data:image/png;base64,",
]  # fmt: skip
PLACES = {
    "input": lambda text: ("embeddings", {"input": text}),
    "list": lambda text: ("embeddings", {"input": [text]}),
    "text": lambda text: ("embeddings", {"input": {"text": text}}),
    "image": lambda text: ("embeddings", {"input": {"image": text}}),
    "message": lambda text: ("embeddings", {"messages": [{"content": text}]}),
    "part": lambda text: ("embeddings", {"messages": [{"content": [{"type": "text", "text": text}]}]}),
    "query": lambda text: ("rerank", {"query": text, "documents": [{"image": data_url(RED)}]}),
    "document": lambda text: ("rerank", {"query": {"image": data_url(RED)}, "documents": [text]}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_data_urls_are_images_or_errors_and_never_texts(client, model, place):
    content, expected = base64.b64encode(RED).decode(), model.encode_images([RED])
    for start in SPELLINGS:
        for text in (start + content, f"{start}{content[:76]}\r\n{content[76:]}"):
            path, body = PLACES[place](text)
            response = client.post(f"/v1/{path}", json=body)
            assert response.status_code == 200, (start, response.text)
            answer = response.json()
            if path == "embeddings":
                assert_equal(torch.tensor([answer["data"][0]["embedding"]]), expected)
            else:
                assert answer["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-6)
    for text in (*DAMAGED, *(start + "aGk=" for start in SPELLINGS)):
        path, body = PLACES[place](text)
        assert client.post(f"/v1/{path}", json=body).status_code == 400, text


def test_searches_reject_data_urls(client, collection):
    for text in (*DAMAGED, *(start + "aGk=" for start in SPELLINGS)):
        response = client.get("/api/search", params={"text": text.strip()})
        assert response.status_code in (400, 422), text
        with pytest.raises(VisavisError, match="got a data URL"):
            search_collection(collection.index, SearchQuery.from_text(text))
    assert not is_data_url("data: a new oil, perhaps")
    assert not is_data_url("data scientists, at night")


def test_documents_of_vllm_are_the_parts_of_one_message(client, model):
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(content)}} for content in (RED, STAR)
    ]
    results = rerank(
        client, query="a red star", documents={"content": parts}, return_documents=True
    )
    scores = model.score([RED, STAR], ["a red star"])[:, 0]
    assert {result["index"]: result["relevance_score"] for result in results} == pytest.approx(
        dict(enumerate(scores.tolist())), abs=1e-6
    )
    assert all(result["document"] == parts[result["index"]] for result in results)


def request_models(base=RequestModel):
    """All models of requests, and the tools of assistants."""
    assert mcp_server.IndexTool, "it is imported"
    for model in base.__subclasses__():
        yield model
        yield from request_models(model)


VALUES = {"query": "a star", "documents": ["a"], "input": "a star", "preferred": "left", "key": "a"}
VALUES |= {"item": "a", "vote": "a", "relevant": True}


@pytest.mark.parametrize(
    "model",
    sorted(set(request_models()), key=lambda model: model.__name__),
    ids=lambda m: m.__name__,
)
def test_null_means_absent_in_every_request(model):
    values = {name: VALUES[name] for name in model.model_fields if name in VALUES}
    if model in (schemas.VoteRequest, schemas.PreferenceRequest):
        values["query"] = {"text": "a star"}
    optional = [name for name, field in model.model_fields.items() if not field.is_required()]
    absent = {name: value for name, value in values.items() if name not in optional}
    for name in optional:
        assert model.model_validate({**absent, name: None}) == model.model_validate(absent)
        if name in ("kind", "after", "before", "since", "until"):
            assert model.model_validate({**absent, name: ""}) == model.model_validate(absent)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("embeddings", {"input": "a star", "truncation": True, "input_type": "query"}),
        ("embeddings", {"input": "a star", "normalized": True, "encoding_format": None}),
        ("rerank", {"query": "a star", "documents": ["a"], "max_tokens_per_doc": 4096}),
    ],
)
def test_unknown_fields_are_ignored_with_a_note(client, caplog, path, body):
    known = {"input", "query", "documents"}
    expected = client.post(f"/v1/{path}", json={name: body[name] for name in body.keys() & known})
    schemas._NOTED = LRUCache[bool](256)
    for _ in range(2):
        response = client.post(f"/v1/{path}", json=body)
        assert (response.status_code, response.json().keys()) == (200, expected.json().keys())
    unknown = sorted(name for name in body.keys() - known if body[name] is not None)
    assert sorted(re.findall("unknown field '(.*?)'", caplog.text)) == unknown


BODIES = {
    "/v1/embeddings": [
        {"input": ["a"], "model": "one", "encoding_format": "float", "user": "me", "x": "b"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"input": {"type": "image_url", "image_url": {"url": data_url(RED)}}, "modality": "text"},
    ],
    "/v1/rerank": [
        {"query": "a", "documents": ["a", {"text": "b"}, MIXED[0]], "return_documents": True},
        {"query": {"content": [MIXED[1]]}, "documents": {"content": MIXED}, "top_n": 1},
    ],
    "/api/votes": [{"query": {"text": "a", "like": "", "image": ""}, "key": "a", "relevant": True}],
    "/api/votes/undo": [{"vote": "a"}],
    "/api/preferences": [{"query": {"text": "a"}, "preferred": "left"}],
}


JSON = {"content-type": "application/json"}


def variants(value):
    """Copies of a JSON value in which one text or name has half a surrogate pair, or a number is
    not finite.
    """
    if isinstance(value, str | int):
        yield "a\ud83d"
        yield math.nan
        yield -math.inf
    elif isinstance(value, list):
        for number, part in enumerate(value):
            for variant in variants(part):
                yield [*value[:number], variant, *value[number + 1 :]]
        yield [*value, "\udc00"]
    else:
        for name, part in value.items():
            for variant in variants(part):
                yield {**value, name: variant}
        yield {**value, "x\udfff": 1}


@pytest.mark.parametrize("path", BODIES)
def test_invalid_characters_and_numbers_name_their_field(client, path):
    routes = {
        route
        for route, methods in client.get("/openapi.json").json()["paths"].items()
        if "post" in methods
    }
    assert routes - {"/api/search"} == set(BODIES), "a search by image has no JSON"
    for valid in BODIES[path]:
        for body in variants(valid):
            response = client.post(path, content=json.dumps(body).encode(), headers=JSON)
            assert response.status_code == 400, response.text
            message = response.json()["error"]
            message = message["message"] if path.startswith("/v1") else message
            field = next(name for name in (*valid, "x", "body") if message.startswith(name))
            assert re.match(rf"{field}[\w\[\].]*: expected (text|a finite)", message), message
    for encoded in (b'{"input": "a\xed\xa0\x80"}', '{"input": "a\\ud800"}'.encode("utf-16")):
        response = client.post("/v1/embeddings", content=encoded, headers=JSON)
        assert response.status_code == 400
        assert "input: expected text, got half of a surrogate pair" in response.text
    for number in (b"1e999", b"9" * 400 + b".0"):
        response = client.post(path, content=b'{"input": ' + number + b"}", headers=JSON)
        assert "input: expected a finite number" in response.text


def test_images_have_a_limit_of_pixels(collection):
    app = create_app([collection], limits=ServerLimits(max_pixels=3000))
    with TestClient(app, "http://localhost") as client:
        response = client.post("/v1/embeddings", json={"input": [data_url(RED)]})
    assert "has 64 x 48 pixels" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["embeddings", "rerank"])
def test_images_of_a_request_have_a_limit_of_pixels(collection, path, monkeypatch):
    """The limit is checked before an image is decoded."""
    app = create_app([collection], limits=ServerLimits(max_request_pixels=10_000))
    # Equal images are decoded once.
    images = [{"image": data_url(png(photo(shift=shift)))} for shift in range(4)]
    bodies = {"embeddings": {"input": images}, "rerank": {"query": "a", "documents": images}}
    with TestClient(app, "http://localhost") as client:
        monkeypatch.setattr(ImageCache, "decode", None)
        response = client.post(f"/v1/{path}", json=bodies[path])
    assert response.status_code == 400
    assert "million pixels in all images of a request" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
def test_work_stops_when_a_client_disconnects(collection, path, monkeypatch):
    images = [png(photo(size=(64, 48 + number))) for number in range(200)]
    documents, asked = [{"image": data_url(image)} for image in images], {"image": data_url(STAR)}
    bodies = {
        "/v1/embeddings": {"input": documents},
        "/v1/rerank": {"query": asked, "documents": documents},
    }
    decoded, decode = list[str](), ImageCache.decode

    async def decode_and_note(self, image, min_side, turn):
        decoded.append(image.name)
        return await decode(self, image, min_side, turn)

    monkeypatch.setattr(ImageCache, "decode", decode_and_note)
    content = json.dumps(bodies[path]).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        while len(decoded) < 3:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": headers, "client": ("1.1.1.1", 1), "scheme": "http"}
    sent = []
    asyncio.run(create_app([collection])(scope, receive, send))
    assert len(decoded) < 20
    assert sent == []


@pytest.mark.slow
def large_image(number):
    """Data URL of one of several images of 40 million pixels."""
    image = Image.new("1", (6300, 6300))
    image.putpixel((number, 0), 1)
    return data_url(png(image))


def test_memory_stays_bounded_with_large_images(index_folder):
    """60 images of 40 million pixels in 400 kB are refused, 6 are encoded one after another."""
    urls = [large_image(number) for number in range(60)]
    small = data_url(RED)
    with served(index_folder) as (address, process), ThreadPoolExecutor(4) as pool:
        ask = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=300).embeddings.create
        ask(model="one", input=small)
        before = peak_memory(process.process.pid)
        with pytest.raises(openai.BadRequestError, match="got 2,381 million"):
            ask(model="one", input=urls)
        assert peak_memory(process.process.pid) < before + 100 * 2**20
        large = [pool.submit(ask, model="one", input=urls[:6]) for _ in range(3)]
        ask(model="one", input=small)
        assert not all(one.done() for one in large), "a small request does not wait for large ones"
        assert [len(one.result().data) for one in large] == [6, 6, 6]
        assert peak_memory(process.process.pid) < before + 1000 * 2**20


def test_other_errors_have_the_form_of_openai(collection):
    app = create_app(
        [collection], bound_to=None, token=TOKEN, limits=ServerLimits(max_body_bytes=2000)
    )
    with TestClient(app, "http://photos.example") as client:
        ask = {"model": "one", "input": "a star"}
        official = official_client(client, api_key=TOKEN)
        assert len(official.embeddings.create(**ask).data) == 1
        with pytest.raises(openai.AuthenticationError) as caught:
            official_client(client, api_key="wrong").embeddings.create(**ask)
        assert (caught.value.code, caught.value.type) == (
            "invalid_api_key",
            "invalid_request_error",
        )
        with pytest.raises(openai.NotFoundError, match="expected one") as caught:
            official.embeddings.create(**ask | {"model": "text-embedding-3-small"})
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.APIStatusError, match="larger than") as caught:
            official.embeddings.create(**ask | {"input": ["a star"] * 500})
        assert caught.value.status_code == 413
        with pytest.raises(openai.NotFoundError, match="not found"):
            official.chat.completions.create(model="one", messages=[])
        bearer = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        response = client.post("/v1/embeddings", content=b"{", headers=bearer)
        assert response.status_code == 400
        assert "expected JSON" in response.json()["error"]["message"]
        origin = bearer | {"origin": "https://evil.example"}
        response = client.post("/v1/embeddings", json=ask, headers=origin)
        assert (response.status_code, response.json()["error"]["param"]) == (403, None)


def test_rate_limit_counts_inputs_and_client_waits(collection):
    """A request costs 1 unit and a text a quarter. The client waits as Retry-After demands."""
    app = create_app([collection], bound_to=None, token=TOKEN, rates=RateLimits(10, 4))
    with TestClient(app, "http://photos.example") as client:
        official = official_client(client, api_key=TOKEN)
        ask = {"model": "one", "input": ["a star"] * 32}
        official.embeddings.create(**ask)
        with pytest.raises(openai.RateLimitError, match="Try again in 2 s") as caught:
            official.embeddings.create(**ask)
        assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
        assert caught.value.response.headers["retry-after"] == "2"
        patient = official_client(client, api_key=TOKEN, max_retries=3)
        assert len(patient.embeddings.create(model="one", input=["a star"] * 4).data) == 4


def rerank(client, **body):
    response = client.post("/v1/rerank", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "one"
    return response.json()["results"]


def test_rerank_scores_equal_model_and_search(client, model, collection_folder):
    keys = [f"trips/{number:02}.png" for number in range(1, 12, 2)]
    contents = [(collection_folder / key).read_bytes() for key in keys]
    documents = [{"image": data_url(content)} for content in contents]
    results = rerank(client, query="a red star", documents=documents)
    scores = model.score(contents, ["a red star"])[:, 0]
    assert [result["index"] for result in results] == scores.argsort(
        descending=True, stable=True
    ).tolist()
    found = {result["index"]: result["relevance_score"] for result in results}
    assert found == pytest.approx(dict(enumerate(scores.tolist())), abs=1e-6)
    assert all("document" not in result for result in results)
    response = client.get("/api/search", params={"text": "a red star", "limit": 100}).json()
    searched = {hit["key"]: hit["score"] for hit in response["sides"][0]["hits"]}
    same = {key: found[number] for number, key in enumerate(keys) if key in searched}
    assert same == pytest.approx({key: searched[key] for key in same}, abs=1e-6)
    assert same


def test_rerank_of_texts_for_an_image(client, model):
    results = rerank(
        client, query={"image": data_url(STAR)}, documents=TEXTS, top_n=2, return_documents=True
    )
    scores = model.score([STAR], TEXTS, direction="i2t")[0]
    best = scores.topk(2)
    assert [result["index"] for result in results] == best.indices.tolist()
    assert [result["relevance_score"] for result in results] == pytest.approx(
        best.values.tolist(), abs=1e-6
    )
    assert [result["document"] for result in results] == [
        {"text": TEXTS[index]} for index in best.indices.tolist()
    ]


def test_rerank_within_a_kind_is_the_cosine(client, model):
    results = rerank(client, query=TEXTS[0], documents=TEXTS, top_n=0)
    cosines = model.encode_texts(TEXTS) @ model.encode_texts(TEXTS[:1])[0]
    assert {result["index"]: result["relevance_score"] for result in results} == pytest.approx(
        dict(enumerate(cosines.tolist())), abs=1e-6
    )
    assert results[0] == {"index": 0, "relevance_score": pytest.approx(1)}


def test_rerank_accepts_mixed_forms_of_vllm(client, model):
    image = {"content": [{"type": "image_url", "image_url": {"url": data_url(RED)}}]}
    text = {"content": [{"type": "text", "text": "a star"}]}
    for query, row in ((text, model.encode_texts(["a star"])), (image, model.encode_images([RED]))):
        results = rerank(client, query=query, documents=[image, text, "a red circle"])
        items = torch.cat([model.encode_images([RED]), model.encode_texts(["a star", TEXTS[0]])])
        assert {result["index"]: result["relevance_score"] for result in results} == pytest.approx(
            dict(enumerate((items @ row[0]).tolist())), abs=1e-6
        )


@pytest.mark.parametrize("query", ["a red star", {"image": data_url(STAR)}])
def test_equal_documents_have_equal_scores_in_their_order(client, query):
    documents = [TEXTS[0], {"image": data_url(RED)}, {"text": TEXTS[0]}, {"image": data_url(STAR)}]
    results = rerank(client, query=query, documents=[*TEXTS, *documents] * 13)
    equal = dict[float, list[int]]()
    for result in results:
        equal.setdefault(result["relevance_score"], []).append(result["index"])
    assert len(equal) == 5
    assert sorted(map(len, equal.values())) == [13, 13, 13, 13, 39]
    assert all(places == sorted(places) for places in equal.values())


def test_equal_inputs_have_equal_vectors_and_count_all_tokens(client):
    inputs = [*TEXTS, data_url(RED)] * 30
    response = client.post("/v1/embeddings", json={"input": inputs}).json()
    found = {text: set() for text in inputs}
    for text, entry in zip(inputs, response["data"], strict=True):
        found[text].add(tuple(entry["embedding"]))
    assert [len(vectors) for vectors in found.values()] == [1] * 4
    once = client.post("/v1/embeddings", json={"input": inputs[:4]}).json()
    assert response["usage"]["total_tokens"] == 30 * once["usage"]["total_tokens"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"query": "a star", "documents": []}, "documents: expected at least 1 item"),
        ({"query": "a star"}, "documents: expected a value, got none"),
        ({"query": ["a", "b"], "documents": ["a"]}, "query: expected a text"),
        ({"query": 3, "documents": ["a"]}, "query: expected a text"),
        ({"query": "a", "documents": [[1, 2]]}, "documents[0]: expected a text"),
        ({"query": "a", "documents": [{"content": MIXED}]}, "Send them as separate documents"),
        ({"query": {"content": MIXED}, "documents": ["a"]}, "Send one of them"),
        ({"query": None, "documents": ["a"]}, "query: expected a text"),
        ({"query": "a star", "documents": ["a", {"url": "a"}]}, "documents[1]: expected a text"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n: expected an integer >= 0"),
        ({"query": {"image": "http://a.b"}, "documents": ["a"]}, "fetches no addresses"),
        ({"query": "a star", "documents": [data_url(b"none")]}, "documents[0] is not an image"),
    ],
)
def test_rerank_rejects_invalid_requests(client, body, text):
    response = client.post("/v1/rerank", json=body)
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]


def test_guide_runs_as_written(client, model, monkeypatch):
    """The Python block, and the requests of the curl commands that send JSON."""
    official, names = official_client(client), dict[str, object]()
    monkeypatch.setattr(openai, "OpenAI", lambda base_url, api_key: official)
    (block,) = read_blocks("docs/guides/serve.md", "python")
    exec(compile(block.text, "serve.md", "exec"), names)
    expected = model.encode_texts(["two dogs on a beach", "a red car"])
    assert_equal(torch.tensor(names["vectors"]), expected)
    commands = [
        shlex.split(line)
        for block in read_blocks("docs/guides/serve.md", "sh")
        for line in block.text.splitlines()
        if line.startswith("curl localhost:8000/v1/")
    ]
    assert len(commands) == 2
    for _, address, _, header, _, body in commands:
        name, _, value = header.partition(": ")
        path = address.removeprefix("localhost:8000")
        response = client.post(path, content=body, headers={name: value})
        assert response.status_code == 200, response.text


def waiting_service(index_folder, monkeypatch):
    """A service whose thread waits for an event, and the batches of texts that it encodes."""
    index, batches, started = ServedIndex(open_index(index_folder)), [], threading.Event()
    encode = index.index.model.encode_texts
    monkeypatch.setattr(
        index.index.model,
        "encode_texts",
        lambda texts: (batches.append(sorted(texts)), encode(texts))[1],
    )
    service = SearchService([index], ServerLimits(), ServerMetrics())
    service._model_thread.submit(started.wait, 60)
    return service, batches, started


def test_embeddings_and_searches_share_a_batch(index_folder, model, monkeypatch):
    service, batches, started = waiting_service(index_folder, monkeypatch)

    async def ask():
        asking = [
            service.encode_texts(service.index(0), ["a red circle", "a star"]),
            service.search(0, QueryKey("a blue square"), NO_FILTER, 5),
            service.encode_texts(service.index(0), ["zzz", "a star"]),
        ]
        tasks = [asyncio.ensure_future(one) for one in asking]
        await asyncio.sleep(0)
        started.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    (found, num_tokens), results, failed = asyncio.run(ask())
    service.close()
    assert batches == [["a blue square", "a red circle", "a star"]]
    assert_equal(found, model.encode_texts(["a red circle", "a star"]))
    assert num_tokens == 9
    assert len(results) >= 5
    assert "zzz" in str(failed)


def test_request_keeps_its_model_when_the_index_is_replaced(index_folder, model, monkeypatch):
    service, batches, started = waiting_service(index_folder, monkeypatch)
    newer = ServedIndex(open_index(index_folder))
    newer.index.model.encode_texts = None
    texts = [f"a star {number}" for number in range(100)]

    async def ask():
        served = service.index(0)
        encoding = asyncio.ensure_future(service.encode_texts(served, texts))
        searching = asyncio.ensure_future(service.search(0, QueryKey("a star"), NO_FILTER, 5))
        await asyncio.sleep(0)
        service.indexes[0] = newer
        started.set()
        return await asyncio.gather(encoding, searching, return_exceptions=True)

    (found, _), search = asyncio.run(ask())
    service.close()
    newer.index.close()
    assert_equal(found, model.encode_texts(texts))
    assert len(batches) == 2
    assert isinstance(search, TypeError), "the search uses the new version and its model"


def test_long_requests_do_not_hold_up_others(index_folder, monkeypatch):
    service, batches, started = waiting_service(index_folder, monkeypatch)
    texts = [f"a star {number}" for number in range(300)]

    async def ask():
        long = asyncio.ensure_future(service.encode_texts(service.index(0), texts))
        await asyncio.sleep(0)
        short = asyncio.ensure_future(service.encode_texts(service.index(0), ["a red circle"]))
        await asyncio.sleep(0)
        started.set()
        await short
        was_running = not long.done()
        return was_running, (await long)[0]

    was_running, found = asyncio.run(ask())
    service.close()
    assert was_running
    assert len(found) == 300
    assert "a red circle" in batches[0]
    assert max(map(len, batches)) == 65


@pytest.mark.slow
def test_official_client_speaks_to_a_process(index_folder, model, monkeypatch):
    monkeypatch.setenv("VISAVIS_TOKEN", TOKEN)
    with served(index_folder) as (address, _):
        official = openai.OpenAI(base_url=f"{address}/v1", api_key=TOKEN)
        response = official.embeddings.create(
            model=official.models.list().data[0].id, input=[*TEXTS, data_url(JPEG)]
        )
        expected = torch.cat([model.encode_texts(TEXTS), model.encode_images([JPEG])])
        assert_equal(vectors(response), expected)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{address}/v1", api_key="wrong").models.list()

        async def ask_at_once():
            async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=TOKEN) as client:
                asking = [
                    client.embeddings.create(model="one", input=f"a star {number}")
                    for number in range(64)
                ]
                return await asyncio.gather(*asking)

        responses = asyncio.run(ask_at_once())
        found = torch.cat([vectors(response) for response in responses])
        assert_equal(found, model.encode_texts([f"a star {number}" for number in range(64)]))
