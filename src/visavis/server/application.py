"""The FastAPI application: routes, security middleware and error responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from visavis.environment import installed_version
from visavis.errors import StorageError, VisavisError
from visavis.feedback.records import FeedbackFile
from visavis.server.limits import RateLimits, ServerLimits
from visavis.server.prometheus import ServerMetrics
from visavis.server.routes import api_routes, service_routes, web_ui_routes
from visavis.server.schemas import RequestRejected, error_response
from visavis.server.search_service import SearchService
from visavis.server.security import SecurityMiddleware, TokenAuth
from visavis.server.served_index import ServedIndex


def create_app(
    indexes: Sequence[ServedIndex],
    feedback: FeedbackFile | None = None,
    *,
    bound_to: str | None = "127.0.0.1",
    token: str | None = None,
    limits: ServerLimits | None = None,
    rates: RateLimits | None = None,
) -> FastAPI:
    """Create the application.

    Args:
        indexes: One index, or two to compare.
        feedback: Feedback file. None: votes are not saved.
        bound_to: Host of a loopback server, whose Host header is checked. None: no check.
        token: Access token required from clients. None: no token.
        limits: Sizes and timeouts. Default: ``ServerLimits()``.
        rates: Request rate of a client. None: no limit.

    Returns:
        The application.

    Raises:
        VisavisError: If there are not one or two indexes, or both have the same name.
    """
    if len(indexes) not in (1, 2):
        raise VisavisError(f"index: expected one index, or two to compare, got {len(indexes)}.")
    if len({index.name for index in indexes}) < len(indexes):
        raise VisavisError(f"index: expected two different names, got {indexes[0].name!r} twice. Pass two different indexes.")
    limits, metrics, auth = limits or ServerLimits(), ServerMetrics(), None if token is None else TokenAuth(token)
    service = SearchService(indexes, feedback, limits, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="visavis", version=installed_version("visavis") or "0", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.include_router(api_routes(service))
    app.include_router(service_routes(service, auth))
    app.include_router(web_ui_routes())
    _add_error_handlers(app)
    app.add_middleware(SecurityMiddleware, bound_to=bound_to, auth=auth, rates=rates, limits=limits, metrics=metrics)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Return every error as a JSON object with one message."""

    @app.exception_handler(RequestRejected)
    async def rejected(_: Request, error: RequestRejected) -> Response:
        return error.response()

    @app.exception_handler(VisavisError)
    async def visavis_error(_: Request, error: VisavisError) -> Response:
        return error_response(507 if isinstance(error, StorageError) else 400, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid_request(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"][1:]) or "request"
        message = first["msg"].removeprefix("Value error, ")
        return error_response(422, f"{location[:80]}: {message[:1].lower()}{message[1:]}.")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        messages = {
            404: f"{request.url.path[:120]}: not found. See /openapi.json for the routes.",
            405: "Method not allowed. See /openapi.json for the routes.",
        }
        response = error_response(error.status_code, messages.get(error.status_code) or str(error.detail))
        response.headers.update(error.headers or {})
        return response
