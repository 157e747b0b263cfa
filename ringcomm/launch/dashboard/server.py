"""The web server of the dashboard: a page, a stream of news, logs, and commands for the job.

The commands are those of a fixed list, see engine/control/commands.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ringcomm.engine.control.commands import parse
from ringcomm.launch.dashboard.access import OPEN, Asked, Gate, has_token, judge
from ringcomm.launch.dashboard.all_runs import AllRuns
from ringcomm.launch.dashboard.connections import Door
from ringcomm.launch.dashboard.source import Source, Viewer, lines_after, whole_log

_STATIC: Final = Path(__file__).with_name("static")
_TYPES: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_INTERVAL_S: Final = 0.35
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


def app(gate: Gate, runs: AllRuns, door: Door, is_ending: Callable[[], bool]) -> Starlette:
    """Return the application that shows `runs` to those whom `gate` lets in, and tells `door`.

    Streams end once is_ending(): the server waits for them, and breaks off what does not end.
    Requests about one run name it by ?run=, with a key of /runs; without, it is the first one.
    """
    return Starlette(
        routes=[
            *(Route(path, _page) for path in OPEN),
            Route("/runs", partial(_runs, runs=runs)),
            Route("/stream", partial(_stream, runs=runs, is_ending=is_ending)),
            Route("/log/{rank:int}", partial(_log, runs=runs)),
            Route("/logs", partial(_logs, runs=runs)),
            Route("/logs/all", partial(_all_logs, runs=runs)),
            Route("/stacks/{rank:int}", partial(_stacks, runs=runs), methods=["POST"]),
            Route("/command", partial(_command, runs=runs), methods=["POST"]),
        ],
        exception_handlers={LookupError: _no_run},
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


async def _no_run(_: Request, __: Exception) -> Response:
    return PlainTextResponse("there is no such run\n", 404)


async def _source(request: Request, runs: AllRuns) -> Source:
    """Return the run that a request is about. Raises LookupError if there is none of its name."""
    return await run_sync(partial(runs.source, request.query_params.get("run", "")))


async def _runs(_: Request, *, runs: AllRuns) -> Response:
    return JSONResponse(await run_sync(runs.listing))


async def _stream(request: Request, *, runs: AllRuns, is_ending: Callable[[], bool]) -> Response:
    source = await _source(request, runs)
    return StreamingResponse(_news(source, is_ending), media_type="application/x-ndjson")


async def _news(source: Source, is_ending: Callable[[], bool]) -> AsyncIterator[str]:
    viewer = Viewer()
    while not is_ending():
        state = await run_sync(partial(source.news, viewer, _INTERVAL_S))
        yield f"{json.dumps(state)}\n"
        await asyncio.sleep(0 if viewer.metrics.is_behind else _INTERVAL_S)


async def _log(request: Request, *, runs: AllRuns) -> Response:
    source = await _source(request, runs)
    return PlainTextResponse(await run_sync(partial(source.log, request.path_params["rank"])))


async def _logs(request: Request, *, runs: AllRuns) -> Response:
    source = await _source(request, runs)
    after = request.query_params.get("after", "")
    return JSONResponse(await run_sync(partial(lines_after, source, after)))


async def _all_logs(request: Request, *, runs: AllRuns) -> Response:
    source = await _source(request, runs)
    return StreamingResponse(whole_log(source), media_type="text/plain; charset=utf-8")


async def _stacks(request: Request, *, runs: AllRuns) -> Response:
    source = await _source(request, runs)
    return PlainTextResponse(await run_sync(partial(source.stacks, request.path_params["rank"])))


async def _command(request: Request, *, runs: AllRuns) -> Response:
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
    source = await _source(request, runs)
    outcome = await run_sync(partial(source.command, command))
    return PlainTextResponse(f"{outcome.text}\n", 200 if outcome.is_done else 409)


def _words(body: bytes) -> list[str]:
    content = json.loads(body)  # its error is a ValueError
    words = content.get("command") if isinstance(content, dict) else None
    if not isinstance(words, list) or not all(isinstance(each, str) for each in words):
        raise ValueError('the body must be JSON such as {"command": ["set", "lr=0.01"]}')
    return words
