"""Puts the service together: the routes, the page, the door, and how errors are said."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from visavis.data.judgements import JudgementFile
from visavis.environment import installed
from visavis.errors import StorageError, VisavisError
from visavis.serving.access import Gate
from visavis.serving.collection import Collection
from visavis.serving.desk import Desk
from visavis.serving.figures import Figures
from visavis.serving.guard import Guard
from visavis.serving.limits import Limits, Rates
from visavis.serving.page_files import page_routes
from visavis.serving.refusals import Refused, refusal
from visavis.serving.routes import api_routes, house_routes


def make_app(
    collections: Sequence[Collection],
    judgements: JudgementFile | None = None,
    *,
    bound_to: str | None = "127.0.0.1",
    token: str | None = None,
    limits: Limits | None = None,
    rates: Rates | None = None,
) -> FastAPI:
    """The service of one index, or of two side by side.

    judgements: where votes are kept; None: they are not. bound_to: the loopback address that requests must name; None: a service that others
    reach. token: what they must bring. rates: how much a client may ask; None: as much as it likes.
    """
    if len(collections) not in (1, 2):
        raise VisavisError(f"{len(collections)} indexes are to be served, expected one, or two to compare.")
    if len({collection.name for collection in collections}) < len(collections):
        raise VisavisError(f"both indexes are called {collections[0].name}: two different ones can be compared.")
    limits, figures, gate = limits or Limits(), Figures(), None if token is None else Gate(token)
    desk = Desk(collections, judgements, limits, figures)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        desk.close()

    app = FastAPI(title="visavis", version=installed("visavis") or "0", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.include_router(api_routes(desk))
    app.include_router(house_routes(desk, gate))
    app.include_router(page_routes())
    _say_errors(app)
    app.add_middleware(Guard, bound_to=bound_to, gate=gate, rates=rates, limits=limits, figures=figures)
    return app


def _say_errors(app: FastAPI) -> None:
    """Every error is a JSON object with one sentence."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return error.response()

    @app.exception_handler(VisavisError)
    async def known(_: Request, error: VisavisError) -> Response:
        return refusal(507 if isinstance(error, StorageError) else 400, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        said = first["msg"].removeprefix("Value error, ")
        return refusal(422, f"{place[:80]}: {said[:1].lower()}{said[1:]}.")

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        sentences = {
            404: f"there is nothing at {request.url.path[:120]}.",
            405: "this cannot be done here: see /openapi.json for what can.",
        }
        response = refusal(error.status_code, sentences.get(error.status_code) or str(error.detail))
        response.headers.update(error.headers or {})
        return response
