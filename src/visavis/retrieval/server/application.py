"""The FastAPI application: search API, votes, health, metrics, login, web UI and error responses."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, RedirectResponse, Response

from visavis.core.environment import installed_version
from visavis.core.errors import StorageError, VisavisError
from visavis.retrieval.items import IndexItem
from visavis.retrieval.server.image_cache import ImageSize
from visavis.retrieval.server.inference_api import inference_routes
from visavis.retrieval.server.limits import RateLimits, ServerLimits, ServerMetrics
from visavis.retrieval.server.schemas import (
    OPENAI_PREFIX,
    ErrorResponse,
    FacetsResponse,
    HealthResponse,
    IndexInfo,
    NamedResponse,
    PreferenceRequest,
    PreferenceResponse,
    QueryModel,
    SearchRequest,
    SearchResponse,
    ServerInfo,
    SideName,
    SideResponse,
    StrictJsonRoute,
    UncertainPairModel,
    UncertainPairsResponse,
    UndoRequest,
    UndoResponse,
    VoteRequest,
    VoteResponse,
    describe_invalid,
    error_response,
)
from visavis.retrieval.server.search_service import SearchService, ServedIndex
from visavis.retrieval.server.security import (
    TOKEN_COOKIE,
    RateLimiter,
    SecurityMiddleware,
    TokenAuth,
    client_name,
    is_loopback,
    validate_host_name,
    validate_root_path,
)

WEB_UI_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
COOKIE_SECONDS = 30 * 86400
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VERSION = installed_version("visavis") or "0"
IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}},
    }
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in {
        400: "The request cannot be answered.",
        401: "An access token is required.",
        403: "The host or origin is not allowed.",
        404: "Not found.",
        408: "The request was received too slowly.",
        409: "The server was started without this feature.",
        410: "The file of the item was moved or removed.",
        413: "The request is too large.",
        422: "A value is invalid.",
        429: "Too many requests.",
    }.items()
}
JPEG_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {"schema": {"type": "string", "format": "binary"}}}}
}
VIDEO_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"content": {"video/*": {"schema": {"type": "string", "format": "binary"}}}}
    for status in (200, 206)
}
VIDEO_RESPONSES |= {416: {"description": "The file has no such range."}}
DEFAULT_LEVEL = 0.5
"""Expected share of irrelevant results at which the web UI draws a line."""
IndexNumber = Annotated[int, Query(ge=0, le=1)]
ItemKey = Annotated[str, Query(max_length=4096)]
ContentVersion = Annotated[str, Query(max_length=64)]


def create_app(
    indexes: Sequence[ServedIndex],
    *,
    saves_votes: bool = False,
    bound_to: str | None = "127.0.0.1",
    host_names: Sequence[str] = (),
    root_path: str = "",
    token: str | None = None,
    limits: ServerLimits | None = None,
    rates: RateLimits | None = None,
    max_irrelevant: float = DEFAULT_LEVEL,
) -> FastAPI:
    """Create the application for one index, or for two to compare."""
    if len({index.name for index in indexes}) < len(indexes):
        raise VisavisError(
            f"index: expected two different names, got {indexes[0].name!r} twice. Pass two "
            "different indexes."
        )
    limits = limits or ServerLimits()
    metrics = ServerMetrics()
    auth = None if token is None else TokenAuth(token)
    service = SearchService(indexes, limits, metrics, saves_votes=saves_votes)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        updates = asyncio.create_task(service.follow_updates())
        yield
        updates.cancel()
        service.close()

    root_path = validate_root_path(root_path)
    plays_videos = bound_to is not None and is_loopback(bound_to) and not host_names
    # Names of a loopback server in the Host header. Empty: the header is not checked.
    allowed = {name.lower() for name in (bound_to,) if name} | {
        validate_host_name(name) for name in host_names
    }
    servers = [{"url": root_path}] if root_path else None
    app = FastAPI(
        title="visavis",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        servers=servers,
        redirect_slashes=False,
    )
    limiter = None if rates is None else RateLimiter(rates)
    app.include_router(api_routes(service, max_irrelevant, plays_videos=plays_videos))
    app.include_router(inference_routes(service, limiter))
    app.include_router(service_routes(service, auth, f"{root_path}/"))
    app.include_router(web_ui_routes())
    _add_error_handlers(app)
    app.add_middleware(
        SecurityMiddleware,
        host_names=frozenset(allowed) or None,
        root_path=root_path,
        auth=auth,
        rate_limiter=limiter,
        limits=limits,
        metrics=metrics,
    )
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Return every error as a JSON object with one message."""

    @app.exception_handler(VisavisError)
    async def visavis_error(request: Request, error: VisavisError) -> Response:
        status = 507 if isinstance(error, StorageError) else 400
        return error_response(status, str(error), path=request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def invalid_request(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name, *rest = first["loc"][1:] or ("request",)
        location = f"{name}{''.join(f'[{p}]' if isinstance(p, int) else f'.{p}' for p in rest)}"
        message = describe_invalid(first, location)
        if first["type"] == "json_invalid":
            message = (
                f"body: expected JSON, got an error at character {first['loc'][-1]} "
                f"({first['ctx']['error']}). Send valid JSON."
            )
        elif first["loc"] == ("body",):
            message = (
                "body: expected a JSON object with the header Content-Type: application/json, got "
                "other data. Send one."
            )
        path = request.scope["path"]
        # OpenAI's API has no status 422.
        status = 400 if path.startswith(OPENAI_PREFIX) else 422
        return error_response(status, message, path=path, param=str(name))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"][:120]
        shown = path if path.isprintable() else repr(path)
        # Routes name the problem. Starlette raises the standard phrase of the status.
        messages = {
            "Not Found": f"{shown}: not found. See /docs for the routes.",
            "Method Not Allowed": "Method not allowed. See /docs for the routes.",
            "There was an error parsing the body": "body: expected JSON in UTF-8, got bytes that are not. Send valid JSON.",
        }
        return error_response(
            error.status_code,
            messages.get(error.detail, error.detail),
            error.headers,
            path=request.scope["path"],
            param=getattr(error, "param", None),
            code=getattr(error, "code", None),
        )


@cache
def web_ui_files() -> dict[str, tuple[bytes, str, str]]:
    """Read the files of the web UI once: content, content type and ETag by name."""
    contents = {}
    for file in files("visavis.retrieval.server").joinpath("web_ui").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in WEB_UI_TYPES:
            content = file.read_bytes()
            contents[file.name] = (
                content,
                WEB_UI_TYPES[suffix],
                f'"{hashlib.sha256(content).hexdigest()[:16]}"',
            )
    return contents


def web_ui_routes() -> APIRouter:
    """Create one route per file of the web UI. No other file can be requested."""
    router = APIRouter(include_in_schema=False)

    def add(route: str, name: str) -> None:
        content, content_type, etag = web_ui_files()[name]

        async def send(request: Request) -> Response:
            headers = {"ETag": etag, "Cache-Control": "no-cache"}
            if request.headers.get("if-none-match") == etag:
                return Response(status_code=304, headers=headers)
            return Response(content, media_type=content_type, headers=headers)

        router.add_api_route(route, send, methods=["GET", "HEAD"])

    for name in web_ui_files():
        if name != "login.html":
            add({"index.html": "/", "docs.html": "/docs"}.get(name, f"/{name}"), name)
    return router


def api_routes(
    service: SearchService, max_irrelevant: float, *, plays_videos: bool = False
) -> APIRouter:
    """Create the routes below ``/api``."""
    router = APIRouter(prefix="/api", responses=ERROR_RESPONSES, route_class=StrictJsonRoute)

    @router.get("/search")
    async def search(request: Request, query: Annotated[SearchRequest, Query()]) -> SearchResponse:
        """Search for a text, an uploaded image or similar items. An empty query returns the newest
        items.
        """
        return await _search_sides(service, query, client_name(request.scope))

    @router.post("/search", openapi_extra=IMAGE_BODY)
    async def search_by_image(
        request: Request, query: Annotated[SearchRequest, Query()]
    ) -> SearchResponse:
        """Search for the image in the body. ``query.image`` of the response identifies it in later
        requests.
        """
        content = await request.body()
        if not content:
            raise HTTPException(
                400,
                "body: expected an image, got an empty body. Send the content of an image file.",
            )
        client = client_name(request.scope)
        image = await service.images.upload(content, client)
        return await _search_sides(service, query.model_copy(update={"image": image}), client)

    async def jpeg(index: int, key: str, size: ImageSize, content_version: str) -> Response:
        item = await service.item(index, key, content_version)
        served = service.index(index)
        try:
            content = await service.images.jpeg(served.index, index, item, size)
        except HTTPException as error:
            if not await asyncio.to_thread(served.is_missing, item):
                raise
            raise HTTPException(410, error.detail) from None
        # With the version of the content in the URL, the image never changes.
        caching = "private, max-age=31536000, immutable" if content_version else "private, no-cache"
        return Response(content, media_type="image/jpeg", headers={"Cache-Control": caching})

    @router.get("/thumbnail", responses=JPEG_RESPONSE, response_class=Response)
    async def thumbnail(
        key: ItemKey, index: IndexNumber = 0, content_version: ContentVersion = ""
    ) -> Response:
        """JPEG of an item of at most 480 pixels per side, without metadata. With
        ``content_version``, it can be cached forever.
        """
        return await jpeg(index, key, "thumbnail", content_version)

    @router.get("/image", responses=JPEG_RESPONSE, response_class=Response)
    async def image(
        key: ItemKey, index: IndexNumber = 0, content_version: ContentVersion = ""
    ) -> Response:
        """JPEG of an item of at most 1600 pixels per side, without metadata. With
        ``content_version``, it can be cached forever.
        """
        return await jpeg(index, key, "image", content_version)

    @router.get("/video", responses=VIDEO_RESPONSES, response_class=Response)
    async def video(
        key: ItemKey, index: IndexNumber = 0, content_version: ContentVersion = ""
    ) -> Response:
        """File of a video, or of the video of a moment, in full or a range of its bytes."""
        if not plays_videos:
            raise HTTPException(
                409,
                "Videos are sent to this machine only, because their files have metadata such as "
                "places. Start visavis serve without --host and --host-name.",
            )
        return await _video_file(service, index, await service.item(index, key, content_version))

    @router.get("/info")
    async def info() -> ServerInfo:
        """The served indexes and the features of the server."""
        return ServerInfo(
            # In the order of their names, which does not reveal the sides of a comparison.
            indexes=[
                IndexInfo(
                    name=index.name,
                    model=index.index.manifest.query_model.model,
                    count=index.count,
                    unfinished=index.index.is_unfinished,
                    version=index.version,
                )
                for index in sorted(service.indexes, key=lambda index: index.name)
            ],
            blind=service.is_comparison,
            votes=bool(service.votes.folders),
            videos=plays_videos,
            version=VERSION,
            max_irrelevant=max_irrelevant,
        )

    @router.get("/facets")
    async def facets(index: IndexNumber = 0) -> FacetsResponse:
        """Values to filter by, with the number of items of each."""
        return await service.read(index, lambda served: served.facets)

    @router.post("/votes")
    async def vote(vote: VoteRequest) -> VoteResponse:
        """Save whether an item is relevant to a query. Null withdraws the vote."""
        key = vote.query.to_key()
        if not key:
            raise HTTPException(
                422, "query: expected a query, got an empty query. Search for something first."
            )
        item = await service.item(vote.index, vote.key)
        name = service.index(vote.index).name
        saved = await asyncio.to_thread(service.votes.record_vote, name, key, item, vote.relevant)
        return VoteResponse(relevant=saved.relevant, vote=saved.vote)

    @router.post("/votes/undo")
    async def undo(undo: UndoRequest) -> UndoResponse:
        """Undo one vote by its name. Votes of other clients on the same item remain."""
        return UndoResponse(relevant=await asyncio.to_thread(service.votes.undo, undo.vote))

    @router.post("/preferences")
    async def prefer(preference: PreferenceRequest) -> PreferenceResponse:
        """Save which of two indexes gave the better results, and reveal their names."""
        left, right, saved = await asyncio.to_thread(
            service.record_preference, preference.query.to_key(), preference.preferred
        )
        return PreferenceResponse(left=left, right=right, saved=saved)

    @router.get("/uncertain")
    async def uncertain(count: Annotated[int, Query(ge=1, le=50)] = 6) -> UncertainPairsResponse:
        """Pairs of a recent query and an item whose votes would be most informative."""
        pairs = [
            UncertainPairModel(
                query=QueryModel.from_key(pair.query),
                index=pair.index,
                hit=service.to_hit(pair.index, pair.query, pair.result),
            )
            for pair in await service.uncertain_pairs(count)
        ]
        return UncertainPairsResponse(pairs=pairs)

    return router


async def _video_file(service: SearchService, number: int, item: IndexItem) -> Response:
    """The file of a video, of which a browser requests ranges."""
    if item.kind == "image":
        raise HTTPException(
            404, f"key: expected a video, got the image {item.key[:80]!r}. Request it as an image."
        )
    try:
        path = await asyncio.to_thread(service.index(number).video_path, item)
    except VisavisError as error:
        raise HTTPException(404, str(error)) from None
    # Browsers choose the decoder by the content, but reject the type of a .mov file.
    return FileResponse(path, media_type="video/webm" if path.suffix == ".webm" else "video/mp4")


async def _search_sides(
    service: SearchService, request: SearchRequest, client: str
) -> SearchResponse:
    """Search every index, and return one page of the results of each."""
    started = time.perf_counter()
    key = request.to_key()
    sides = list[SideResponse]()
    top = request.offset + request.limit
    names: tuple[SideName, ...] = ("left", "right") if service.is_comparison else ("only",)
    for side, number in zip(names, service.side_order(key), strict=True):
        results = await service.search(number, key, request.to_item_filter(), top + 1, client)
        page = results.hits[request.offset : top]
        present = await asyncio.to_thread(service.present, number, page)
        votes = await asyncio.to_thread(service.votes.of_query, number, key)
        hits = [service.to_hit(number, key, result, votes) for result in present]
        named = list[NamedResponse]()
        if not request.offset:
            found = await asyncio.to_thread(service.present, number, results.named)
            named = [service.to_named(number, key, each, votes) for each in found]
        has_more = len(results.hits) > top
        at_limit = top >= service.limits.max_results
        sides.append(
            SideResponse(
                side=side,
                index=number,
                hits=hits,
                missing=len(page) - len(hits),
                has_more=has_more and not at_limit,
                is_cut=has_more and at_limit,
                no_match=results.no_match,
                correction=results.correction,
                unknown_words=list(results.unknown_words),
                named=named,
            )
        )
    milliseconds = round(1000 * (time.perf_counter() - started), 1)
    return SearchResponse(query=QueryModel.from_key(key), sides=sides, milliseconds=milliseconds)


def service_routes(
    service: SearchService, auth: TokenAuth | None, cookie_path: str = "/"
) -> APIRouter:
    """Create the routes for health, metrics and login."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> HealthResponse:
        """Health check."""
        return HealthResponse(status="ok", items=sum(index.count for index in service.indexes))

    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
    )
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        content = generate_latest(service.metrics.registry)
        return Response(content, headers={"Content-Type": METRICS_TYPE})

    if auth is None:
        return router

    @router.get("/login", include_in_schema=False)
    async def login_page(request: Request) -> Response:
        token = request.query_params.get("token")
        if token is not None:
            return _log_in(request, auth, token, cookie_path)
        content, content_type, _ = web_ui_files()["login.html"]
        return Response(content, media_type=content_type)

    @router.post("/login", include_in_schema=False)
    async def log_in(request: Request) -> Response:
        form = parse_qs((await request.body()).decode("utf-8", "replace"))
        return _log_in(request, auth, form.get("token", [""])[0], cookie_path)

    return router


def _log_in(request: Request, auth: TokenAuth, token: str, cookie_path: str) -> Response:
    if not auth.is_valid_token(token):
        content, content_type, _ = web_ui_files()["login.html"]
        return Response(
            content.replace(b"<!--wrong-->", b"The token is not correct. Check it and try again."),
            401,
            media_type=content_type,
        )
    response = RedirectResponse("./", 303)
    secure = request.scope["scheme"] == "https"
    response.set_cookie(
        TOKEN_COOKIE,
        auth.cookie,
        max_age=COOKIE_SECONDS,
        path=cookie_path,
        httponly=True,
        samesite="strict",
        secure=secure,
    )
    return response
