"""The live page, served read-only and to this machine only.

Any process that reaches a loopback port can send requests, and so can any page open in a local browser. Therefore only
loopback names are accepted as `Host` (against DNS rebinding), no other origin may read or embed an answer, only GET and
HEAD are accepted, and files are looked up in a list, never by path.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError, OctavoError
from octavo.lab.monitor.dashboard import answers, page
from octavo.lab.monitor.dashboard.runs import RunCollection, runs_below
from octavo.lab.monitor.store.writer import to_json

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

PORT = 7117
HOST = "127.0.0.1"
NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Accepted names in `Host`."""
_TRIES = 20
SLOW_SECONDS = 10.0
"""A connection that for so long neither completes a request nor takes more of its answer is closed."""


def application(*roots: str | Path) -> Starlette:
    """Return the ASGI application for the runs at or below one or several folders.

    Raises:
        StoreError: the folder does not exist.
        UnsupportedError: starlette or plotly is not installed.
    """
    page.require("starlette", "plotly")
    from starlette.applications import Starlette
    from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route

    known = runs_below(*roots)
    modules = {name: f"/static/{name}" for name in page.scripts()}
    preloads = [f'<link rel="modulepreload" href="{address}">' for address in modules.values()]
    html = page.page("\n".join([_HEAD, *preloads]), modules, _START)
    files = {name: (text, "text/javascript") for name, text in page.scripts().items()}
    files |= {page.STYLE: (page.text_of(page.STYLE), "text/css"), page.ICON: (page.text_of(page.ICON), "image/svg+xml")}
    plotly = page.plotly()

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name == page.PLOTLY:
            return FileResponse(plotly, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})
        if name not in files:
            return PlainTextResponse("no such file", 404)
        text, media_type = files[name]
        return Response(text, media_type=media_type)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        yield
        known.close()

    routes = [
        Route("/", lambda request: HTMLResponse(html)),
        Route("/static/{name}", static),
        Route("/api/{name}", lambda request: _answer(known, request)),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    policy = _POLICY.format(map=page.hashed(page.import_map(modules)))
    app.add_middleware(_Guard, headers={**_HEADERS, "Content-Security-Policy": policy})
    return app


def serve(*roots: str | Path, port: int | None = None, ready: Callable[[str], None] = lambda address: None) -> None:
    """Serve until interrupted.

    Args:
        roots: folders of runs, or one run.
        port: port number; 0 for any free port. By default `PORT` or the next free one.
        ready: called with the address before the first request is accepted.

    Raises:
        StoreError: the folder does not exist.
        ConfigError: the port is taken.
        UnsupportedError: a package is not installed.
    """
    page.require("starlette", "uvicorn", "plotly")
    import uvicorn

    app = application(*roots)
    with bound(port) as listener:
        ready(f"http://{HOST}:{listener.getsockname()[1]}")
        config = uvicorn.Config(
            app,
            http=_timed_protocol(),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run(sockets=[listener])


@contextlib.contextmanager
def bound(port: int | None) -> Iterator[socket.socket]:
    """Bind a loopback socket to a port, or to the first free one from `PORT` on.

    Raises:
        ConfigError: the port is taken or invalid.
    """
    wanted = range(PORT, PORT + _TRIES) if port is None else [port]
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with listener:
        for each in wanted:
            try:
                listener.bind((HOST, each))
                listener.listen()  # early requests wait for the server to start
            except OSError:
                continue
            except OverflowError as error:
                raise ConfigError(f"--port {each}: ports range from 0 to 65535.") from error
            yield listener
            return
        taken = f"{wanted[0]}" if len(wanted) == 1 else f"{wanted[0]} to {wanted[-1]}"
        raise ConfigError(f"--port {taken}: already in use. Choose another, or 0 for any free port.")


def _timed_protocol() -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with `SLOW_SECONDS`: its own timeouts begin after the first answer."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._seen: tuple[Any, int] = (None, 0)
            self._timer = self.loop.call_later(SLOW_SECONDS, self._check)

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def _check(self) -> None:
            before, self._seen = self._seen, (self.cycle, self.transport.get_write_buffer_size())
            is_computing = self.cycle is not None and not self.cycle.response_complete and not self._seen[1]
            if self._seen == before and not is_computing:
                self.transport.abort()
            else:
                self._timer = self.loop.call_later(SLOW_SECONDS, self._check)

    return TimedProtocol


def _answer(known: RunCollection, request: Request) -> Response:
    from starlette.responses import Response

    name, status = request.path_params["name"], 200
    try:
        found = answers.answer(known, name, {key: request.query_params.getlist(key) for key in request.query_params})
    except OctavoError as error:
        found, status = {"error": str(error)}, 400 if isinstance(error, ConfigError) else 404
    if isinstance(found, bytes):
        return Response(found, media_type="application/octet-stream")
    return Response(to_json(found), status, media_type="application/json")


_HEAD = f"""\
<link rel="stylesheet" href="/static/{page.STYLE}">
<link rel="icon" href="/static/{page.ICON}" type="image/svg+xml">
<link rel="preload" href="/static/{page.PLOTLY}" as="script">"""
_START = '<script type="module" src="/static/app.js"></script>'
_POLICY = (
    "default-src 'none'; script-src 'self' {map}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:;"
    " connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


class _Guard:
    """Rejects foreign requests and adds the security headers to every answer."""

    def __init__(self, app: Any, headers: dict[str, str]) -> None:
        self._app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                added = [(name, value) for name, value in self._headers if name not in given]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        rejection = _rejection(scope)
        if rejection is None:
            await self._app(scope, receive, guarded)
        else:
            from starlette.responses import PlainTextResponse

            text, status = rejection
            await PlainTextResponse(text, status)(scope, receive, guarded)


def _rejection(scope: Message) -> tuple[str, int] | None:
    """Return the reason and status of a rejected request; None for an accepted one."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1 or _name_of(hosts[0]) not in NAMES:
        return f"this dashboard answers to {', '.join(sorted(NAMES))} only", 403
    sites = {value for name, value in headers if name == b"sec-fetch-site"}
    if sites & {b"cross-site", b"same-site"} and scope["path"] != "/":
        return "this dashboard does not answer other sites", 403
    if scope["method"] not in ("GET", "HEAD"):
        return "this dashboard is read-only", 405
    return None


def _name_of(host: str) -> str:
    """Return the host without its port, in lower case."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()
