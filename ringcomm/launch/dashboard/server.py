"""The web server of the dashboard: a page, a stream of news, logs, and commands for the job.

The commands are those of a fixed list, see engine/control/commands.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ringcomm.engine.control.commands import parse
from ringcomm.launch.dashboard.access import HEADER, Asked, Gate, judge
from ringcomm.launch.dashboard.source import Source

_STATIC: Final = Path(__file__).with_name("static")
_INTERVAL_S: Final = 0.25
_COMMAND_MAX: Final = 1024  # bytes
_HEADERS: Final = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_WHY: Final = {
    401: "open the address that `ringcomm dashboard` has printed, with its token",
    403: "this request may come from another site",
    421: "this is the dashboard of another host",
}


def app(gate: Gate, source: Source, is_ending: Callable[[], bool]) -> Starlette:
    """Return the application that shows `source` to those whom `gate` lets in.

    Streams end once is_ending(): the server waits for them, and breaks off what does not end.
    """
    return Starlette(
        routes=[
            Route("/", _page),
            Route("/stream", partial(_stream, source=source, is_ending=is_ending)),
            Route("/log/{rank:int}", partial(_log, source=source)),
            Route("/command", partial(_command, source=source), methods=["POST"]),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=partial(_admit, gate=gate))],
    )


async def _admit(
    request: Request, call_next: Callable[[Request], Awaitable[Response]], *, gate: Gate
) -> Response:
    status = judge(
        gate,
        Asked(
            request.method,
            request.headers.get("host", ""),
            token=request.query_params.get("token", ""),
            cookie=request.cookies.get(gate.cookie, ""),
            origin=request.headers.get("origin", ""),
            has_header=HEADER in request.headers,
        ),
    )
    if status == 200:
        response = await call_next(request)
    elif status == 303:
        response = RedirectResponse("/", status_code=303)
        response.set_cookie(gate.cookie, gate.token, httponly=True, samesite="strict")
    else:
        response = PlainTextResponse(f"{_WHY[status]}\n", status)
    response.headers.update(_HEADERS)
    return response


async def _page(_: Request) -> Response:
    return Response((_STATIC / "index.html").read_bytes(), media_type="text/html")


async def _stream(_: Request, *, source: Source, is_ending: Callable[[], bool]) -> Response:
    return StreamingResponse(_news(source, is_ending), media_type="text/event-stream")


async def _news(source: Source, is_ending: Callable[[], bool]) -> AsyncIterator[str]:
    positions: dict[str, int] = {}
    while not is_ending():
        state = await run_sync(partial(_next, source, positions))
        yield f"data: {json.dumps(state)}\n\n"
        await asyncio.sleep(_INTERVAL_S)


def _next(source: Source, positions: dict[str, int]) -> dict[str, Any]:
    return source.state() | {"metrics": source.metrics(positions)}


async def _log(request: Request, *, source: Source) -> Response:
    text = await run_sync(partial(source.log, request.path_params["rank"]))
    return PlainTextResponse(text)


async def _command(request: Request, *, source: Source) -> Response:
    """Give a command to the job: JSON such as {"command": ["set", "lr=0.01"]}.

    400: it is no command. 409: the job has not taken it. Both say why.
    """
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _COMMAND_MAX:
            return PlainTextResponse("too long\n", 413)
    try:
        command = parse(_words(body))
    except ValueError as error:
        return PlainTextResponse(f"{error}\n", 400)
    outcome = await run_sync(partial(source.command, command))
    return PlainTextResponse(f"{outcome.text}\n", 200 if outcome.is_done else 409)


def _words(body: bytes) -> list[str]:
    content = json.loads(body)  # its error is a ValueError
    words = content.get("command") if isinstance(content, dict) else None
    if not isinstance(words, list) or not all(isinstance(each, str) for each in words):
        raise ValueError('the body must be JSON such as {"command": ["set", "lr=0.01"]}')
    return words
