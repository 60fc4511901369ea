"""Embeddings and reranking below ``/v1`` in the forms of other servers: texts as of OpenAI, images as
of vLLM, Infinity and Jina, and reranking as of Jina, Cohere and vLLM.

No form fetches an image from a URL.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar
from uuid import uuid4

import numpy as np
from fastapi import APIRouter, Request
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import to_json
from starlette.responses import Response

from visavis.core.data_uris import is_data_url, read_base64, read_data_url
from visavis.core.errors import DataError, format_value
from visavis.retrieval.server.image_cache import ImageInput
from visavis.retrieval.server.limits import IMAGE_INPUT_COST, TEXT_INPUT_COST
from visavis.retrieval.server.schemas import (
    LIMITS,
    ApiError,
    OpenAIErrorResponse,
    OpenAIRequestModel,
    StrictJsonRoute,
)
from visavis.retrieval.server.search_service import SearchService, ServedIndex
from visavis.retrieval.server.security import RateLimiter, client_name

Item: TypeAlias = str | ImageInput
"""A text or image."""
ItemType = TypeVar("ItemType", str, ImageInput, Item)
NO_FETCHING = (
    "expected an image as data:image/...;base64,..., got an address. This server fetches no "
    "addresses. Send the content of the image"
)
IMAGE_ADDRESS = (
    "expected a text or data:image/...;base64,..., got the address of an image. This server fetches "
    'no addresses. Send the content of the image, or {"text": "..."} to encode the address as a text'
)
TOKENS = (
    "expected texts, got token ids. They belong to the tokenizer of another model. Send texts, in "
    "LangChain with OpenAIEmbeddings(check_embedding_ctx_length=False)"
)
FORMS = (
    'expected a text, {{"text": "..."}}, {{"image": "data:image/...;base64,..."}}, or parts '
    '{{"type": "text", "text": "..."}} and {{"type": "image_url", "image_url": {{"url": '
    '"data:image/...;base64,..."}}}}, got {}. Send one of these forms'
)
ONE_PART = (
    "expected one text or one image, got {}. This model encodes texts and images separately. {}"
)
SEPARATELY = {
    "input": "Send them as separate inputs",
    "messages": "Send one of them, or several in the field input",
    "query": "Send one of them",
    "documents": "Send them as separate documents",
}
"""Advice for several texts or images in place of one, by the field of the request."""
PART_NAMES = {
    "text": {"type", "text"},
    "image_url": {"type", "image_url"},
    "content": {"role", "name", "content"},
}
"""Names of the parts of a message by its kind, and of a message. Others may hold content that would
be lost.
"""
_IMAGE_ADDRESS = re.compile(
    r"\s*(?:https?|ftp|file|s3|gs)://\S+\.(?:jpe?g|png|webp|gif|bmp|tiff?|avif|hei[cf]|jxl)(?:[?#]\S*)?\s*",
    re.IGNORECASE,
)


def read_image_input(text: str) -> bytes:
    """Read an image of a request.

    Args:
        text: A data URL, or its base64 part alone.

    Returns:
        Content of the image file.

    Raises:
        ValueError: If the text is an address, or not base64.

    Example:
        >>> read_image_input("data:image/png;base64,aGk="), read_image_input("aGk=")
        (b'hi', b'hi')
    """
    if is_data_url(text):
        return read_data_url(text)
    if "://" in text[:20]:
        raise ValueError(NO_FETCHING)
    return read_base64(text)


def read_item(value: Any, field: str = "input") -> str | bytes:
    """Read a text or image of a request in one of its forms. A data URL is an image in all of them.

    Args:
        value: A text, a data URL of an image, ``{"text": ...}``, ``{"image": ...}``, or
            ``{"content": ...}`` with a text or the parts of a message.
        field: Name of the field, for the advice in errors.

    Returns:
        The text, or the content of the image file. Several texts are joined by line breaks.

    Raises:
        ValueError: If the value has another form, or is neither one image nor texts.

    Example:
        >>> read_item("a star"), read_item({"image": "aGk="})
        ('a star', b'hi')
        >>> read_item({"content": [{"type": "text", "text": "a star"}]})
        'a star'
    """
    if isinstance(value, str) and _IMAGE_ADDRESS.fullmatch(value):
        raise ValueError(IMAGE_ADDRESS)
    if field == "input" and isinstance(value, int | list):
        raise ValueError(TOKENS)
    parts = list(_read_parts(value, field))
    texts = [part for kind, part in parts if kind == "text"]
    if parts and not texts and len(parts) == 1:
        return read_image_input(parts[0][1])
    if not texts or len(texts) < len(parts):
        counts = (len(texts), "text"), (len(parts) - len(texts), "image")
        given = " and ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in counts)
        raise ValueError(ONE_PART.format(given, SEPARATELY[field]))
    text = "\n".join(texts)
    if not text.strip():
        raise ValueError("expected text, got an empty text. Leave it out")
    if len(text) > LIMITS.max_input_chars:
        raise ValueError(
            f"expected at most {LIMITS.max_input_chars:,} characters, got {len(text):,}. Split the "
            "text"
        )
    return text


def _read_parts(value: Any, field: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Kind and value of each text and image of a form."""
    if isinstance(value, dict):
        # Clients send null for what they leave out.
        value = {name: part for name, part in value.items() if part is not None}
        kind = "content" if "content" in value else value.get("type")
        if isinstance(kind, str) and (other := value.keys() - PART_NAMES.get(kind, {"type"})):
            raise ValueError(FORMS.format(f"a part with {', '.join(map(repr, sorted(other)))}"))
    match value:
        case str(text) | {"type": "text", "text": str(text)} | {"content": str(text)}:
            yield _kind(text), text
        case {"type": "image_url", "image_url": str(url) | {"url": str(url)}}:
            yield "image", url
        case {"content": list(parts)} if depth < 2 and all(isinstance(p, dict) for p in parts):
            for part in parts:
                yield from _read_parts(part, field, depth + 1)
        case dict() if value and all(
            name in ("text", "image") and isinstance(part, str) for name, part in value.items()
        ):
            for name, part in value.items():
                yield (_kind(part) if name == "text" else name), part
        case _:
            raise ValueError(FORMS.format("null" if value is None else format_value(value)))


def _kind(text: str) -> str:
    return "image" if is_data_url(text) else "text"


def _validate_item(value: Any, info: ValidationInfo) -> str | bytes:
    try:
        return read_item(value, info.field_name or "input")
    except DataError as error:
        raise ValueError(str(error)) from None


def _as_list(value: Any, info: ValidationInfo) -> list[Any]:
    """The inputs of a request. With ``modality: image``, texts are images, too. The documents of
    vLLM are the parts of one message.
    """
    if info.field_name == "documents" and isinstance(value, dict):
        match {name: part for name, part in value.items() if part is not None}:
            case {"content": list(parts)}:
                value = [{"content": [part]} for part in parts]
    values = value if isinstance(value, list) else [value]
    if info.data.get("modality") == "image":
        values = [{"image": item} if isinstance(item, str) else item for item in values]
    return values


def _as_content(value: Any) -> Any:
    """The messages of a request, or the parts of a query, as one message."""
    return {"content": value} if isinstance(value, list) else value


_CONTENT_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "type": {"const": "text"},
                    "text": {"type": "string", "minLength": 1},
                },
                "required": ["type", "text"],
            },
            {
                "type": "object",
                "properties": {
                    "type": {"const": "image_url"},
                    "image_url": {
                        "type": "object",
                        "properties": {"url": {"type": "string"}},
                        "required": ["url"],
                    },
                },
                "required": ["type", "image_url"],
            },
        ]
    },
}
_ITEM_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "string",
            "minLength": 1,
            "description": "A text, or an image as data:image/...;base64,...",
        },
        {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 1}},
            "required": ["text"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"image": {"type": "string", "description": "Data URL or base64."}},
            "required": ["image"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"content": _CONTENT_SCHEMA},
            "required": ["content"],
            "additionalProperties": False,
        },
    ]
}
_ITEMS_SCHEMA = {
    "anyOf": [
        *_ITEM_SCHEMA["anyOf"],
        {
            "type": "array",
            "items": _ITEM_SCHEMA,
            "minItems": 1,
            "maxItems": LIMITS.max_inputs,
        },
    ]
}
_MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string"},
            "content": {"anyOf": [{"type": "string"}, _CONTENT_SCHEMA]},
        },
        "required": ["content"],
    },
}
ModelName = Annotated[str | None, Field(max_length=4096)]
Input = Annotated[Any, PlainValidator(_validate_item)]
Inputs = Annotated[
    list[Input],
    Field(min_length=1, max_length=LIMITS.max_inputs),
    BeforeValidator(_as_list),
    WithJsonSchema(_ITEMS_SCHEMA),
]


class EmbeddingRequest(OpenAIRequestModel):
    """Texts or images to encode.

    Attributes:
        model: Name of a served model. Null: the only one.
        modality: ``"image"``: texts of ``input`` are data URLs or base64, as in Infinity.
        input: Texts or images.
        messages: One text or image, as in vLLM.
        encoding_format: Form of the vectors. base64: of float32 values, little-endian.
        dimensions: Number of leading dimensions to return, which the model must be trained for.
        user: Not used.
    """

    model: ModelName = None
    modality: Literal["text", "image"] = "text"
    input: Inputs | None = None
    messages: Annotated[
        Input | None, BeforeValidator(_as_content), WithJsonSchema(_MESSAGES_SCHEMA)
    ] = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


class EmbeddingData(BaseModel):
    """A vector.

    Attributes:
        object: Always ``"embedding"``.
        index: Position of the input.
        embedding: Unit vector.
    """

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that were read.

    Attributes:
        prompt_tokens: Tokens of the texts, without those that were cut off. Images have none.
        total_tokens: The same number.
    """

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    """Vectors of the inputs.

    Attributes:
        object: Always ``"list"``.
        data: Vectors, in the order of the inputs.
        model: Name of the model.
        usage: Tokens that were read.
    """

    object: Literal["list"] = "list"
    data: list[EmbeddingData]
    model: str
    usage: Usage


class RerankRequest(OpenAIRequestModel):
    """Documents to rank for a query.

    Attributes:
        model: Name of a served model. Null: the only one.
        query: Text or image.
        documents: Texts or images.
        top_n: Number of results. Null or 0: all.
        return_documents: Whether results contain the documents.
    """

    model: ModelName = None
    query: Annotated[Input, BeforeValidator(_as_content), WithJsonSchema(_ITEM_SCHEMA)]
    documents: Inputs
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool = False


class RerankResult(BaseModel):
    """A document.

    Attributes:
        index: Position among the documents.
        relevance_score: Score of the model.
        document: The document as it was sent, a text as ``{"text": ...}``.
    """

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankResponse(BaseModel):
    """Documents, best first.

    Attributes:
        id: Name of the response.
        object: Always ``"list"``.
        model: Name of the model.
        results: Documents, best first. Equal scores are in the order of the request.
        usage: Tokens that were read.
    """

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RerankResult]
    usage: Usage


class ModelInfo(BaseModel):
    """A served model.

    Attributes:
        id: Name of the model.
        object: Always ``"model"``.
        created: Start of the server, as a Unix timestamp.
        owned_by: Always ``"visavis"``.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["visavis"] = "visavis"


class ModelsResponse(BaseModel):
    """Served models.

    Attributes:
        object: Always ``"list"``.
        data: The models.
    """

    object: Literal["list"] = "list"
    data: list[ModelInfo]


def inference_routes(service: SearchService, rate_limiter: RateLimiter | None) -> APIRouter:
    """Create the routes below ``/v1``."""
    statuses = (400, 401, 403, 404, 408, 413, 422, 429)
    router = APIRouter(
        prefix="/v1",
        responses={status: {"model": OpenAIErrorResponse} for status in statuses},
        route_class=StrictJsonRoute,
    )
    models = service.model_numbers()
    created = int(time.time())
    listed = [ModelInfo(id=name, created=created) for name in models]

    def find_model(name: str | None) -> tuple[str, int]:
        if name is None and len(models) == 1:
            name = next(iter(models))
        if name not in models:
            given = "none" if name is None else f"{name[:80]!r}"
            raise ApiError(
                400 if name is None else 404,
                f"model: expected {' or '.join(models)}, got {given}. Use a name of /v1/models.",
                param="model",
                code=None if name is None else "model_not_found",
            )
        return name, models[name]

    def charge(request: Request, items: Sequence[Item]) -> None:
        if rate_limiter is None:
            return
        cost = sum(TEXT_INPUT_COST if isinstance(item, str) else IMAGE_INPUT_COST for item in items)
        # A larger cost could never be spent.
        if wait_s := rate_limiter.spend(
            client_name(request.scope), min(cost, rate_limiter.rates.burst)
        ):
            raise rate_limiter.error(wait_s)

    @router.get("/models")
    async def list_models() -> ModelsResponse:
        """The served models."""
        return ModelsResponse(data=listed)

    @router.get("/models/{name:path}")
    async def show_model(name: str) -> ModelInfo:
        """A served model."""
        return listed[list(models).index(find_model(name)[0])]

    @router.post("/embeddings", response_model=EmbeddingResponse)
    async def embed(request: Request, query: EmbeddingRequest) -> Response:
        """Unit vectors of texts and images."""
        if (query.input is None) == (query.messages is None):
            given = "none" if query.input is None else "both"
            raise ApiError(
                400,
                f"input: expected one of input and messages, got {given}. Send one of them.",
                param="input",
            )
        name, number = find_model(query.model)
        # One model answers the whole request, also if an update replaces the index.
        served = service.index(number)
        client = client_name(request.scope)
        items = _named("input", query.input or [], client) or _named(
            "messages", [query.messages], client
        )
        charge(request, items)
        vectors, num_tokens = await encode_items(service, served, items, client)
        if query.dimensions is not None:
            vectors = await service.run_model(
                served, lambda _: served.shorten(vectors, query.dimensions), client=client
            )
        data = [
            {"object": "embedding", "index": index, "embedding": embedding}
            for index, embedding in enumerate(_vector_values(vectors, query.encoding_format))
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        content = {"object": "list", "data": data, "model": name, "usage": usage}
        # pydantic writes a million numbers ten times as fast as json.
        return Response(to_json(content), media_type="application/json")

    @router.post("/rerank", response_model_exclude_none=True)
    async def rerank(request: Request, query: RerankRequest) -> RerankResponse:
        """Documents in the order of their scores for a query. A document and a query of different
        kinds have the score of the model, and of the same kind the cosine of their vectors.
        """
        name, number = find_model(query.model)
        # One model answers the whole request, also if an update replaces the index.
        served = service.index(number)
        client = client_name(request.scope)
        [asked] = _named("query", [query.query], client)
        items = _named("documents", query.documents, client)
        charge(request, [asked, *items])
        scores, num_tokens = await score_items(service, served, asked, items, client)
        order = np.argsort(-scores, kind="stable")[: query.top_n or None].tolist()
        shown = await _sent_documents(request) if query.return_documents else {}
        results = [
            RerankResult(
                index=index,
                relevance_score=scores[index].item(),
                document={"text": document}
                if isinstance(document := shown.get(index), str)
                else document,
            )
            for index in order
        ]
        usage = Usage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        return RerankResponse(id=f"rerank-{uuid4().hex}", model=name, results=results, usage=usage)

    return router


async def encode_items(
    service: SearchService, served: ServedIndex, items: Sequence[Item], client: str
) -> tuple[np.ndarray, int]:
    """Encode texts and images to unit vectors ``[N, D]``, and count the tokens of the texts."""
    texts = [item for item in items if isinstance(item, str)]
    images, places = _distinct([item for item in items if isinstance(item, ImageInput)])
    text_rows, num_tokens = await service.encode_texts(served, texts, client) if texts else ((), 0)
    found = await service.encode_images(served, images) if images else np.empty(0, np.float32)
    image_rows = found[places]
    rows = iter(text_rows), iter(image_rows)
    return np.stack([next(rows[isinstance(item, ImageInput)]) for item in items]), num_tokens


async def score_items(
    service: SearchService, served: ServedIndex, query: Item, items: Sequence[Item], client: str
) -> tuple[np.ndarray, int]:
    """Score texts and images for a query: ``[N]``, and the number of tokens of the texts."""
    items, places = _distinct(items)
    is_other = np.array([type(item) is not type(query) for item in items])
    if bool(is_other.any()) and await service.run_model(
        served, lambda _: served.score_is_cosine, client=client
    ):
        is_other[:] = False
    scores = np.zeros(len(items), np.float32)
    num_tokens = 0
    same, others = (
        [item for item, flag in zip(items, is_other, strict=True) if flag == other]
        for other in (False, True)
    )
    if same:
        vectors, num_tokens = await encode_items(service, served, [query, *same], client)
        scores[~is_other] = vectors[1:] @ vectors[0]
    if others:
        found, more_tokens = await service.score_pairs(served, query, others)
        scores[is_other] = found
        num_tokens += more_tokens
    return scores[places], num_tokens


def _distinct(items: Sequence[ItemType]) -> tuple[list[ItemType], list[int]]:
    """The distinct items, and the place of each item among them."""
    # Rounding depends on the place in a batch, so that equal items would have different vectors.
    numbers = dict[str | bytes, int]()
    distinct = list[ItemType]()
    places = list[int]()
    for item in items:
        content: str | bytes = item if isinstance(item, str) else item.content
        if content not in numbers:
            numbers[content] = len(distinct)
            distinct.append(item)
        places.append(numbers[content])
    return distinct, places


def _named(field: str, contents: Sequence[Any], client: str) -> list[Item]:
    """Texts and images of a field. Errors name an image by its position."""
    return [
        content if isinstance(content, str) else ImageInput(content, f"{field}[{number}]", client)
        for number, content in enumerate(contents)
    ]


async def _sent_documents(request: Request) -> dict[int, Any]:
    """The documents of a request as they were sent, by their position."""
    sent = (await request.json())["documents"]
    if isinstance(sent, dict) and isinstance(sent.get("content"), list):
        sent = sent["content"]
    return dict(enumerate(sent if isinstance(sent, list) else [sent]))


def _vector_values(vectors: np.ndarray, encoding_format: str) -> list[Any]:
    """Vectors in a form of JSON: lists of numbers, or float32 in base64."""
    if encoding_format == "float":
        return vectors.tolist()
    return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
