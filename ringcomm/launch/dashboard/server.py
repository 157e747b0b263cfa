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
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ringcomm.engine.control.commands import parse
from ringcomm.launch.dashboard.access import OPEN, Asked, Gate, has_token, judge
from ringcomm.launch.dashboard.connections import Door
from ringcomm.launch.dashboard.metrics import MetricReader
from ringcomm.launch.dashboard.source import Source

_STATIC: Final = Path(__file__).with_name("static")
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
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


def app(gate: Gate, source: Source, door: Door, is_ending: Callable[[], bool]) -> Starlette:
    """Return the application that shows `source` to those whom `gate` lets in, and tells `door`.

    Streams end once is_ending(): the server waits for them, and breaks off what does not end.
    """
    return Starlette(
        routes=[
            *(Route(path, _page) for path in OPEN),
            Route("/stream", partial(_stream, source=source, is_ending=is_ending)),
            Route("/log/{rank:int}", partial(_log, source=source)),
            Route("/command", partial(_command, source=source), methods=["POST"]),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=partial(_admit, gate=gate, door=door))],
    )


async def _admit(
    request: Request,
    call_next: Callable[[Request], Awaitable[Response]],
    *,
    gate: Gate,
    door: Door,
) -> Response:
    authorization = request.headers.get("authorization", "")
    if request.client is not None and has_token(authorization, gate.token):
        door.has_shown_token((request.client.host, request.client.port))
    status = judge(
        gate,
        Asked(
            request.method,
            request.scope["path"],
            request.headers.get("host", ""),
            authorization,
            request.headers.get("origin", ""),
        ),
    )
    if status == 200:
        response = await call_next(request)
    else:
        response = PlainTextResponse(f"{_WHY[status]}\n", status)
    response.headers.update(_HEADERS)
    return response


async def _page(request: Request) -> Response:
    path = _STATIC / (Path(request.scope["path"]).name or "index.html")
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix])


async def _stream(_: Request, *, source: Source, is_ending: Callable[[], bool]) -> Response:
    return StreamingResponse(_news(source, is_ending), media_type="application/x-ndjson")


async def _news(source: Source, is_ending: Callable[[], bool]) -> AsyncIterator[str]:
    reader = MetricReader()
    while not is_ending():
        state = await run_sync(partial(_next, source, reader))
        yield f"{json.dumps(state)}\n"
        await asyncio.sleep(0 if reader.is_behind else _INTERVAL_S)


def _next(source: Source, reader: MetricReader) -> dict[str, Any]:
    return source.state() | {"metrics": source.metrics(reader, _INTERVAL_S)}


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
