"""How a function becomes a command: shared options in, one answer out, one error boundary.

A command is a plain or async function whose first parameter is the `Invocation`; it returns an
`Answer` and raises Penstock's errors. `command` adds `--json` (and `--url`, `--api-key` where it
talks to a node), runs the function, prints the answer, and turns errors into exit codes.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from penstock.cli.exits import Exit, exit_of
from penstock.cli.output import console, say, show, to_json
from penstock.errors import FailedPrecondition, PenstockError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.client.connection import Connection

URL_DEFAULT: Final = "penstock://127.0.0.1:7440"
_CONNECTION: Final = ("url", "api_key", "ca")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command found: `document` for `--json`, `view` for a person."""

    document: Any
    view: RenderableType | Callable[[], RenderableType] | None = None
    code: Exit = Exit.OK


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """The options that every command shares."""

    json: bool = False
    url: str = URL_DEFAULT
    api_key: str | None = None
    ca: Path | None = None  # authorities to trust for a penstocks:// url

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A native connection to the node at `url`, or to one run inside the folder `url`."""
        from penstock.cli.connect import connected

        async with connected(self.url, api_key=self.api_key, ca=self.ca) as connection:
            yield connection

    def confirm(self, question: str, *, force: bool) -> None:
        """Return only if the caller wants it: by `--force`, or by answering on a terminal."""
        if force:
            return
        if self.json or not sys.stdin.isatty():
            raise FailedPrecondition(f"{question} Say --force to do it.", field="force")
        if not typer.confirm(question, default=False, err=True):
            raise FailedPrecondition("not confirmed, nothing was changed", field="force")


Body = Callable[..., Answer | Coroutine[Any, Any, Answer | None] | None]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Url = Annotated[str | None, typer.Option("--url", help="The node's url, or a data folder.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="The API key.")]
Ca = Annotated[Path | None, typer.Option("--ca", help="Authorities to trust for penstocks://.")]


def group(help: str, *, name: str | None = None) -> typer.Typer:
    """A set of commands; without one of them it prints its help."""
    return typer.Typer(
        name=name,
        help=help,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def command(app: typer.Typer, name: str, *, connects: bool = True) -> Callable[[Body], Body]:
    """Register a function of the `Invocation` as the command `name`."""

    def register(body: Body) -> Body:
        def invoke(ctx: typer.Context, **arguments: Any) -> None:
            invocation = _invocation(ctx, arguments, connects=connects)
            raise typer.Exit(int(execute(body, invocation, arguments)))

        hints = get_type_hints(body, include_extras=True)
        own = list(inspect.signature(body).parameters.values())[1:]
        parameters = [_parameter("ctx", typer.Context)]
        parameters += [p.replace(annotation=hints[p.name]) for p in own]
        parameters += [_parameter(n, kind, default) for n, kind, default in _shared(connects)]
        keyword = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.Signature([p.replace(kind=keyword) for p in parameters])
        invoke.__signature__ = signature  # type: ignore[attr-defined]
        invoke.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, help=inspect.getdoc(body))(invoke)
        return body

    return register


def _shared(connects: bool) -> list[tuple[str, Any, Any]]:
    options: list[tuple[str, Any, Any]] = [("as_json", Json, False)]
    if connects:
        options += [("url", Url, None), ("api_key", ApiKey, None), ("ca", Ca, None)]
    return options


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
    try:
        result = body(invocation, **arguments)
        answer = asyncio.run(result) if inspect.iscoroutine(result) else result
        if answer is None:
            return Exit.OK
        assert isinstance(answer, Answer)
        _print(answer, as_json=invocation.json)
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


def _print(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        print(to_json(answer.document))
        return
    show(answer.view() if callable(answer.view) else answer.view)


def folder_of(url: str) -> Path | None:
    """The data folder that `url` names, or None when it is the address of a node."""
    return None if "://" in url else Path(url)
