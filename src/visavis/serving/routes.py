"""The routes of the service: search, pictures, votes, and what is known of it all."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from visavis.environment import installed
from visavis.serving.access import COOKIE, Gate
from visavis.serving.desk import Desk
from visavis.serving.figures import CONTENT_TYPE
from visavis.serving.page_files import page_files
from visavis.serving.refusals import Refused
from visavis.serving.shapes import (
    About,
    Answer,
    Choice,
    Doubt,
    Doubts,
    Error,
    Facets,
    Health,
    IndexAbout,
    Question,
    Revealed,
    Search,
    Side,
    SideName,
    Vote,
    VoteKept,
)

PICTURE = {"requestBody": {"required": True, "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "description": said}
    for status, said in {
        400: "The request cannot be answered.",
        401: "A token is needed.",
        403: "It comes from elsewhere.",
        404: "There is no such thing.",
        408: "It came too slowly.",
        409: "It is not for this service.",
        413: "It is too large.",
        422: "A value is not what was expected.",
        429: "Too much was asked.",
    }.items()
}
JPEG: dict[int | str, dict[str, Any]] = {200: {"content": {"image/jpeg": {"schema": {"type": "string", "format": "binary"}}}}}
Index = Annotated[int, Query(ge=0, le=1)]
Key = Annotated[str, Query(max_length=4096)]


def api_routes(desk: Desk) -> APIRouter:
    """What the page and programs ask."""
    router = APIRouter(prefix="/api", responses=REFUSALS)

    async def answer(search: Search) -> Answer:
        started, asked, sides = time.perf_counter(), search.asked(), list[Side]()
        top = search.offset + search.limit
        names: tuple[SideName, ...] = ("left", "right") if desk.blind else ("only",)
        for side, number in zip(names, desk.order(asked), strict=True):
            results = await desk.search(number, asked, search.where(), top + 1)
            hits = [desk.hit(asked, result) for result in results.hits[search.offset : top]]
            more = len(results.hits) > top and top < desk.limits.results
            sides.append(Side(side=side, index=number, hits=hits, more=more, nothing_fits=results.nothing_fits))
        query = Question(text=asked.text, like=asked.like, picture=asked.picture)
        return Answer(query=query, sides=sides, milliseconds=round(1000 * (time.perf_counter() - started), 1))

    @router.get("/search")
    async def search(query: Annotated[Search, Query()]) -> Answer:
        """The items that fit a query best; without one the newest."""
        return await answer(query)

    @router.post("/search", openapi_extra=PICTURE)
    async def search_by_picture(request: Request, query: Annotated[Search, Query()]) -> Answer:
        """The items that fit a picture best, its content being the body; ``query.picture`` of the answer names it for the next page."""
        content = await request.body()
        if not content:
            raise Refused(400, "the picture is missing: send its content as the body of the request.")
        return await answer(query.model_copy(update={"picture": await desk.upload(content)}))

    async def jpeg(index: int, key: str, how: str, *, kept: bool) -> Response:
        content = await desk.picture(index, key, how)
        keeping = "private, max-age=31536000, immutable" if kept else "private, no-cache"
        return Response(content, media_type="image/jpeg", headers={"Cache-Control": keeping})

    @router.get("/thumbnail", responses=JPEG, response_class=Response)
    async def thumbnail(key: Key, index: Index = 0, version: Annotated[str, Query(max_length=64)] = "") -> Response:
        """A small JPEG of an item, without metadata. version: as in the results; then it may be kept for good."""
        return await jpeg(index, key, "thumbnail", kept=bool(version))

    @router.get("/picture", responses=JPEG, response_class=Response)
    async def picture(key: Key, index: Index = 0, version: Annotated[str, Query(max_length=64)] = "") -> Response:
        """A JPEG of an item, of at most 1600 pixels a side, without metadata."""
        return await jpeg(index, key, "picture", kept=bool(version))

    @router.get("/about")
    async def about() -> About:
        """What is served."""
        known = [
            IndexAbout(name=one.name, model=str(one.about["model"]), count=len(one.items))
            for one in sorted(desk.collections, key=lambda one: one.name)
        ]
        return About(indexes=known, blind=desk.blind, votes=desk.file is not None, version=installed("visavis") or "0")

    @router.get("/facets")
    async def facets(index: Index = 0) -> Facets:
        """What one can filter by."""
        found = desk.collection(index).facets
        return Facets(kinds=found.kinds, folders=found.folders, years=found.years, metadata=found.metadata)

    @router.post("/votes")
    async def vote(vote: Vote) -> VoteKept:
        """Keep whether an item fits a query; null takes it back."""
        desk.vote(vote.index, vote.query.asked(), vote.key, vote.fits)
        return VoteKept(fits=vote.fits)

    @router.post("/choices")
    async def choose(choice: Choice) -> Revealed:
        """Keep which of two indexes answered better, and learn which was which."""
        left, right = desk.prefer(choice.query.asked(), choice.prefers)
        return Revealed(left=left, right=right, kept=desk.file is not None)

    @router.get("/ask")
    async def ask(count: Annotated[int, Query(ge=1, le=50)] = 6) -> Doubts:
        """Pairs of a query and an item whose judgement would teach most, from the queries of late."""
        return Doubts(
            pairs=[
                Doubt(
                    query=Question(text=pair.asked.text, like=pair.asked.like, picture=pair.asked.picture),
                    index=pair.index,
                    hit=desk.hit(pair.asked, pair.result),
                )
                for pair in desk.doubtful(count)
            ]
        )

    return router


def house_routes(desk: Desk, gate: Gate | None) -> APIRouter:
    """Whether the service lives, its figures, and the way in."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Health:
        """That the service lives."""
        return Health(status="ok", items=sum(len(one.items) for one in desk.collections))

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(desk.figures.text(), headers={"Content-Type": CONTENT_TYPE})

    if gate is None:
        return router

    @router.get("/login", include_in_schema=False)
    async def ask_for_token(request: Request) -> Response:
        token = request.query_params.get("token")
        if token is not None:
            return _enter(request, gate, token)
        content, kind, _ = page_files()["login.html"]
        return Response(content, media_type=kind)

    @router.post("/login", include_in_schema=False)
    async def take_token(request: Request) -> Response:
        form = parse_qs((await request.body()).decode("utf-8", "replace"))
        return _enter(request, gate, form.get("token", [""])[0])

    return router


def _enter(request: Request, gate: Gate, token: str) -> Response:
    if not gate.knows(token):
        content, kind, _ = page_files()["login.html"]
        return Response(content.replace(b"<!--wrong-->", b"That is not the token."), 401, media_type=kind)
    response = RedirectResponse("/", 303)
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, gate.cookie, max_age=30 * 86400, httponly=True, samesite="strict", secure=secure)
    return response
