"""The pages as a Starlette application: addresses, the guard in front of them, templates, and parts that are fetched again.

Left alone on purpose: StaticFiles, FileResponse, forms, sessions and `request.url`, where Starlette's known holes were.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module, resources
from typing import Any

from anyio import CapacityLimiter, to_thread
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from tunix_rt import __version__
from tunix_rt.dashboard import charts, formats
from tunix_rt.dashboard.guard import HEADERS, Guard
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Handler, Page, Site
from tunix_rt.errors import NotFound, TunixError

PAGES: Mapping[str, str] = {
    "/": "runs",
    "/runs/{run_id}": "run",
    "/runs/{run_id}/answers": "answers",
    "/runs/{run_id}/evidence": "evidence",
    "/compare": "compare",
    "/data": "data",
    "/plan": "plan",
    "/doctor": "doctor",
    "/try": "chat",
}
"""Address -> module in `pages`. A `run_id` is looked up in the index: nothing in an address is ever a path of this computer."""
Action = Callable[[Site, str, bytes], dict[str, Any]]
"""The site, the id in the path, and the body of the request."""
ACTIONS: Mapping[str, str] = {"/runs/{run_id}/evidence": "verify_run", "/doctor": "look_again", "/try": "ask"}
"""Address -> function of its page's module."""
STATIC = {"style.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
MOST_BODY = 64 * 1024
THREADS = 4
"""For pages at the same time; the others wait."""


def make_app(site: Site, guard: Guard) -> Starlette:
    limiter: list[CapacityLimiter] = []

    async def in_thread(work: Callable[[], Response]) -> Response:
        if not limiter:
            limiter.append(CapacityLimiter(THREADS))  # made inside the event loop
        return await to_thread.run_sync(work, limiter=limiter[0])

    def shown(handler: Handler) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return await in_thread(partial(respond, site, handler, request))

        return endpoint

    def done(action: Action) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                body = await _body(request)
            except ClientDisconnect:
                return PlainTextResponse("the request ended early\n", 400)
            if len(body) > MOST_BODY:
                return PlainTextResponse(f"at most {MOST_BODY:,} bytes\n", 413)
            return await in_thread(partial(act, site, action, request.path_params.get("run_id", ""), body))

        return endpoint

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            return PlainTextResponse("no such file\n", 404)
        return conditional(request, Response(static_files()[name], media_type=STATIC[name]))

    routes = [Route(path, shown(partial(call, path, "page"))) for path in PAGES]
    routes += [Route(path, done(partial(call, path, name)), methods=["POST"]) for path, name in ACTIONS.items()]
    routes.append(Route("/static/{name}", static))
    routes.append(Route("/{anything:path}", shown(_no_page)))
    made = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware), Middleware(Guarded, guard=guard)])
    made.router.redirect_slashes = False
    return made


class Guarded:
    """Refuses what the guard refuses, exchanges the key for a cookie, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        answer = self._refused(scope) or self._app
        await answer(scope, receive, send_guarded)

    def _refused(self, scope: Scope) -> Response | None:
        address = (scope.get("raw_path") or b"") + scope["query_string"]
        if refusal := self._guard.refusal(scope["method"], address, scope["headers"]):
            return PlainTextResponse(f"{refusal.text}\n", refusal.status)
        is_static = scope["path"].startswith("/static/")
        if is_static or self._guard.holds_key(scope["headers"]):
            return None
        try:
            query = Query.parse(scope["query_string"].decode("ascii", "replace"))
        except TunixError as error:
            return PlainTextResponse(f"{error.problem}\n", 400)
        if scope["method"] == "POST" or not self._guard.is_key(query.get("key")):
            return PlainTextResponse("open the address that tunix-rt printed: it contains the key\n", 403)
        # Relative, so that no path can make it another host.
        clean = query.with_(key=None)
        place = "./" + scope["path"].rpartition("/")[2].replace(":", "%3A") + (f"?{clean}" if clean else "")
        return Response(status_code=303, headers={"location": place, "set-cookie": self._guard.set_cookie()})


# --- pages ------------------------------------------------------------------------------------------------------------


def call(path: str, function: str, *words: Any) -> Any:
    """A function of the page at `path`. What a page needs is imported when it is first looked at: the list of runs, which is
    first, needs no planner, no data and no checks of evidence."""
    return getattr(import_module(f"tunix_rt.dashboard.pages.{PAGES[path]}"), function)(*words)


def respond(site: Site, handler: Handler, request: Request) -> Response:
    """The page, or the part of it that the header `Part` names; its head alone where the browser has the same."""
    path = request.scope["path"]
    try:
        query = Query.parse(request.scope["query_string"].decode("ascii", "replace"))
        page = handler(site, query, request.path_params.get("run_id", ""))
    except TunixError as error:
        query = Query()
        page = error_page(error)
    response = Response(rendered(site, page, path, query, request.headers.get("part", "")), page.status)
    response.headers.update({"content-type": "text/html; charset=utf-8", "vary": "Part, Cookie"})
    return conditional(request, response)


def rendered(site: Site, page: Page, path: str, query: Query, part: str) -> bytes:
    """The last page with a stamp is kept: a list that many tabs ask for every second."""
    address = (path, query, part)
    known, stamp, body = site.cache.get("rendered", (None, None, b""))
    if page.stamp is None or known != address or stamp != page.stamp:
        body = render(page, path, query, part, has_chat=site.chat is not None).encode("utf-8", "replace")
        if page.stamp is not None:
            site.cache["rendered"] = address, page.stamp, body
    return bytes(body)


def error_page(error: TunixError) -> Page:
    """What is wrong, and the way out."""
    status = 404 if isinstance(error, NotFound) else 400
    return Page(template="error.html", title="Error", values=error, status=status)


def find_page(path: str) -> tuple[Handler, str]:
    """The page function for an address, and the id in it; without a server."""
    for pattern in PAGES:
        if match := compile_path(pattern)[0].match(path):
            return partial(call, pattern, "page"), match.groupdict().get("run_id", "")
    return _no_page, ""


def _no_page(site: Site, query: Query, run_id: str) -> Page:
    raise NotFound("there is no such page", fix="go to the list of runs")


def act(site: Site, action: Action, run_id: str, body: bytes) -> Response:
    try:
        return JSONResponse(action(site, run_id, body))
    except TunixError as error:
        status = 404 if isinstance(error, NotFound) else 400
        return JSONResponse({"problem": error.problem, "fix": error.fix}, status)


async def _body(request: Request) -> bytes:
    """At most a little more than `MOST_BODY`."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BODY:
            break
    return body


def conditional(request: Request, response: Response) -> Response:
    etag = f'"{hashlib.sha256(response.body).hexdigest()[:24]}"'
    response.headers["etag"] = etag
    if response.status_code == 200 and request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"etag": etag})
    return response


# --- templates --------------------------------------------------------------------------------------------------------


@cache
def environment() -> Environment:
    """Everything is escaped. Templates contain no arithmetic: a figure is made by a page function or by `formats`."""
    made = Environment(
        loader=PackageLoader("tunix_rt.dashboard"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters.update(formats.FILTERS)
    made.globals.update(charts=charts, version=__version__)
    return made


def render(
    page: Page, path: str, query: Query, part: str = "", *, is_file: bool = False, has_chat: bool = False
) -> str:
    """A whole page, or the block `part` of it alone. As a file it has no script."""
    template = environment().get_template(page.template)
    values = {"page": page, "v": page.values, "path": path, "query": query, "is_file": is_file, "has_chat": has_chat}
    block = template.blocks.get(part) if part else None
    return template.render(values) if block is None else "".join(block(template.new_context(values)))


@cache
def static_files() -> dict[str, bytes]:
    folder = resources.files("tunix_rt.dashboard") / "static"
    return {name: (folder / name).read_bytes() for name in STATIC}
