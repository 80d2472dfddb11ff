"""How a function becomes a command: shared options in, one answer out, one error boundary.

A command is a plain or async function whose first parameter is the `Invocation`; it returns an
`Answer` and raises Penstock's errors. `command` adds `--json` (and `--url`, `--api-key` where it
talks to a node), runs the function, prints the answer, and turns errors into exit codes, of which
`docs/cli.md` has the reader's table. A command that talks to a node has one connection.
"""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_type_hints

import typer
from typer.core import TyperGroup

from penstock import errors
from penstock.console import console, say, to_json
from penstock.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    Unavailable,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.client.client import Client
    from penstock.client.network.connection import Connection

T = TypeVar("T")
URL_DEFAULT: Final = "penstock://127.0.0.1:7440"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Force = Annotated[bool, typer.Option("--force", help="Do not ask.")]
TopicName = Annotated[str, typer.Argument(help="The topic's name.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")]
Interval = Annotated[float, typer.Option(help="Seconds between refreshes.", min=0.1)]
Where = Annotated[
    list[str] | None,
    typer.Option(help="Only vectors with such metadata: lang=de, price<10, a JSON object."),
]
Rounds = Annotated[int | None, typer.Option(help="Stop after this many refreshes.")]
# What a command that talks to a node may be told of it, also before the command's name.
_CONNECTION: Final = {
    "url": Annotated[str | None, typer.Option(help="The node's url, or a data folder.")],
    "api_key": Annotated[str | None, typer.Option(help="The API key.")],
    "ca": Annotated[Path | None, typer.Option(help="Authorities to trust for penstocks://.")],
}


class Exit(IntEnum):
    OK = 0
    FAILED = 1  # a check did not hold, or stored data is damaged
    USAGE = 2  # the command line is wrong
    NOT_FOUND = 3  # no such topic, message or key
    CALLER = 4  # the request is wrong, or was not confirmed
    UNAVAILABLE = 5  # try again later: no node, no space, a bound is reached
    UNAUTHENTICATED = 6  # no API key, an unknown one, or a revoked one
    CONFLICT = 7  # the world moved on: a lease was lost, a sequence is taken
    INTERNAL = 70  # a bug in this command
    INTERRUPTED = 130  # Ctrl-C


# The first class that matches decides, so the specific ones stand first.
_BY_ERROR: tuple[tuple[type[PenstockError], Exit], ...] = (
    (NotFound, Exit.NOT_FOUND),
    (errors.Unauthenticated, Exit.UNAUTHENTICATED),
    (errors.CallerError, Exit.CALLER),
    (errors.RetryableError, Exit.UNAVAILABLE),
    (errors.WorldMoved, Exit.CONFLICT),
    (errors.Fatal, Exit.FAILED),
)


def exit_of(error: PenstockError) -> Exit:
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), Exit.INTERNAL)


def pairs_of(texts: Iterable[str] | None, *, option: str) -> dict[str, str]:
    """The given pairs as a map; raises `InvalidArgument` that names the option."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise InvalidArgument(f"--{option} needs name=value, not {text!r}", field=option)
        found[name] = value
    return found


def values_of(texts: Iterable[str] | None, *, option: str) -> dict[str, Any]:
    """As `pairs_of`, with each value as JSON reads it (numbers, true, false), else as text."""
    return {name: _value(text) for name, text in pairs_of(texts, option=option).items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def time_of(text: str | None, *, field: str) -> datetime | None:
    """A point in time as a person writes it; UTC unless it says otherwise."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidArgument(f"{field} is not an ISO 8601 time: {text}", field=field) from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Answer:
    """What a command found: `document` for `--json`, and a `view` of it for a person."""

    document: Any
    view: RenderableType | Callable[[Any], RenderableType] | None = None
    code: Exit = Exit.OK

    def drawn(self) -> RenderableType:
        view = self.view(self.document) if callable(self.view) else self.view
        return view or ""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    json: bool = False
    url: str = URL_DEFAULT
    api_key: str | None = None
    ca: Path | None = None  # authorities to trust for a penstocks:// url

    @property
    def folder(self) -> Path | None:
        """The data folder that `url` names, or None when it is the address of a node."""
        if "://" in self.url:
            return None
        folder = Path(self.url)
        if not folder.is_dir():
            raise NotFound(f"no data folder at {folder}", folder=str(folder))
        return folder

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A native connection to the node at `url`, or to one run inside the folder `url`."""
        from penstock.client.network.endpoints import open_connection

        quiet_logs()
        async with AsyncExitStack() as stack:
            folder = self.folder
            if folder is not None:
                from penstock.server.embedded import EmbeddedNode, config_of

                node = EmbeddedNode(config_of(folder), api_key=self.api_key)
                stack.push_async_callback(node.close)
                connection = await node.connect()
            else:
                opening = open_connection(self.url, api_key=self.api_key, tls=self.ca)
                connection = await self._reached(opening)
            stack.push_async_callback(connection.close)
            yield connection

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[Client]:
        """The same as a client of the SDK, for commands that do more than call."""
        from penstock import Options, connect

        quiet_logs()
        client = connect(self.folder or self.url, self.api_key, self.ca, options=Options(**options))
        await self._reached(client.__aenter__())
        try:
            yield client
        finally:
            await client.close()

    async def _reached(self, opening: Awaitable[T]) -> T:
        try:
            return await opening
        except Unavailable as error:
            if self.folder is not None:
                raise
            raise Unavailable(
                f"{error.message}; start a node with `penstock serve`,"
                " or name a data folder with --url",
                url=self.url,
            ) from error

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """The answer to one administrative call; arguments of None are left out."""
        async with self.connection() as connection:
            given = {name: value for name, value in arguments.items() if value is not None}
            answer: dict[str, Any] = await connection.call(method, **given)
            return answer

    async def listed(self, method: str, field: str, /, **arguments: Any) -> dict[str, Any]:
        async with self.connection() as connection:
            return await listed(connection, method, field, **arguments)

    async def destroy(
        self, method: str, /, *, question: str, force: bool, **arguments: Any
    ) -> dict[str, Any]:
        """The answer to a destructive call about a topic or a key, once the caller agrees."""
        subject = arguments.get("topic")
        async with self.connection() as connection:
            if subject is not None:
                await connection.call("topic_get", topic=subject)
            self.confirm(question, force=force)
            granted = await connection.call(
                "confirm", method=method, subject=subject or arguments["id"]
            )
            answer: dict[str, Any] = await connection.call(
                method, **arguments, force=True, confirm=granted["confirm"]
            )
            return answer

    def confirm(self, question: str, *, force: bool) -> None:
        """Return only if the caller wants it: by `--force`, or by answering on a terminal."""
        if force:
            return
        if self.json or not sys.stdin.isatty():
            raise FailedPrecondition(f"{question} Say --force to do it.", field="force")
        if not typer.confirm(question, default=False, err=True):
            raise FailedPrecondition("not confirmed, nothing was changed", field="force")


Body = Callable[..., Answer | Coroutine[Any, Any, Answer | None] | None]


def group(help: str | None = None, *, cls: type[TyperGroup] = TyperGroup) -> typer.Typer:
    """A set of commands; without one of them it prints its help."""
    return typer.Typer(
        cls=cls,
        help=help,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def command(
    app: typer.Typer,
    name: str,
    *,
    connects: bool = True,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[Body], Body]:
    """Register a function of the `Invocation` as the command `name`. It has the options that are
    its parameters, and others, which are None unless they are given."""

    def register(body: Body) -> Body:
        def invoke(ctx: typer.Context, **arguments: Any) -> None:
            invocation = _invocation(ctx, arguments, connects=connects)
            raise typer.Exit(int(execute(body, invocation, arguments)))

        hints = get_type_hints(body, include_extras=True)
        own = list(inspect.signature(body).parameters.values())[1:]
        parameters = [_parameter("ctx", typer.Context)]
        parameters += [
            p.replace(annotation=hints[p.name]) for p in own if p.kind is not p.VAR_KEYWORD
        ]
        parameters += [_parameter(n, kind, None) for n, kind in options.items()]
        parameters.append(_parameter("as_json", Json, False))
        parameters += [_parameter(n, kind, None) for n, kind in _CONNECTION.items() if connects]
        keyword = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.Signature([p.replace(kind=keyword) for p in parameters])
        invoke.__signature__ = signature  # type: ignore[attr-defined]
        invoke.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, help=inspect.getdoc(body))(invoke)
        return body

    return register


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> Any:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _invocation(ctx: typer.Context, arguments: dict[str, Any], *, connects: bool) -> Invocation:
    """Options given to the command win over those given before its name."""
    root = ctx.find_root().obj
    outer = root if isinstance(root, Invocation) else Invocation()
    given: dict[str, Any] = {"json": arguments.pop("as_json") or outer.json}
    if connects:
        given |= {name: arguments.pop(name) or getattr(outer, name) for name in _CONNECTION}
    return replace(outer, **given)


def execute(body: Body, invocation: Invocation, arguments: dict[str, Any]) -> Exit:
    """Run one command to its exit code; everything it has to say is printed on the way."""
    import asyncio  # not needed to list commands, and slow to import

    try:
        result = body(invocation, **arguments)
        answer = asyncio.run(result) if inspect.iscoroutine(result) else result
        if answer is None:
            return Exit.OK
        assert isinstance(answer, Answer)
        if invocation.json:
            print(to_json(answer.document))
        elif answer.view is not None:
            console().print(answer.drawn())
        return answer.code
    except PenstockError as error:
        return report(error, as_json=invocation.json)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader left; a second complaint at exit would be noise
        return Exit.OK
    # The process's last boundary. Nobody cancels a command but the command itself: a bug too.
    except (Exception, asyncio.CancelledError):  # noqa: BLE001
        say(traceback.format_exc())
        return Exit.INTERNAL


def report(error: PenstockError, *, as_json: bool) -> Exit:
    code = exit_of(error)
    if as_json:
        print(to_json({"error": error.to_wire(), "exit_code": int(code)}))
    else:
        console(stderr=True).print(
            f"error: {error.message}", style="red", markup=False, soft_wrap=True
        )
    return code


async def looked(
    cli: Invocation,
    look: Callable[[], Awaitable[Answer]],
    *,
    watch: bool,
    interval_s: float,
    rounds: int | None,
) -> Answer | None:
    """What `look` finds; to watch, it is shown again and again: for ever, or so many times."""
    if not watch:
        return await look()
    import asyncio

    from rich.live import Live

    done = 0
    with Live(console=console(), auto_refresh=False) as live:
        while rounds is None or done < rounds:
            if done:
                await asyncio.sleep(interval_s)
            answer = await look()
            if cli.json:
                print(to_json(answer.document, indent=None), flush=True)
            else:
                live.update(answer.drawn(), refresh=True)
            done += 1
    return None


def quiet_logs() -> None:
    """Errors alone, and to stderr: stdout is for the command's own answer."""
    from penstock.node.observe.logs import configure

    configure("error")


async def listed(
    connection: Connection, method: str, field: str, /, **arguments: Any
) -> dict[str, Any]:
    """The answer to a call with the rows of all pages under `field`."""
    from penstock.client.network.connection import all_pages

    return await all_pages(connection.call, method, field, **arguments)
