"""The `k3` command: verbs are looked up by name and imported when they are asked for.

    k3 serve ...  ->  k3compile/cli/serve.py      a function `serve`, or a typer.Typer `app` with sub-verbs

A verb returns nothing or an exit code. ``ValueError`` is the user's mistake, and so is a file that cannot be
read or written: one line on stderr and code 2.
"""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

# What the parser raises for a wrong option, argument or verb, in the click that typer is built on.
UsageError: type[Exception] = typer.BadParameter.__base__
# torch reads it when it first takes memory: from 2 MB on it asks the system for large pages, without which a
# core that streams a matrix waits for page tables.
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE", "1"
VERBS = (
    "serve", "chat", "make-checkpoint", "plan", "dry-run", "explain", "inspect", "export", "diff", "doctor",
    "bench", "kernels", "gpu-check",
)  # fmt: skip


class LazyVerbs(TyperGroup):
    """Knows the verbs by name and builds one only when it is used, so that `k3 --help` starts no torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in VERBS if find_spec(module_of(name))]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb asked for; for an unknown one the nearest is named."""
        if args and not args[0].startswith("-") and args[0] not in (known := self.list_commands(ctx)):
            near = get_close_matches(args[0], known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"k3 has no verb {args[0]!r}{hint}; verbs: {', '.join(known)}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(module_of(cmd_name))
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False)
            app.command(cmd_name)(getattr(module, cmd_name.replace("-", "_")))
        command = typer.main.get_command(app)
        command.name = cmd_name
        return command


def module_of(verb: str) -> str:
    return f"k3compile.cli.{verb.replace('-', '_')}"


def exit_with(code: object, **options: object) -> None:
    """What a verb returned is the exit code."""
    raise typer.Exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=LazyVerbs,
    help="k3compile: compute the fast Kimi K3 from the plain one, and serve it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    result_callback=exit_with,
)


@app.callback()
def k3() -> None:
    """k3compile: compute the fast Kimi K3 from the plain one, and serve it."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 a verb's own "no", 2 misuse."""
    os.environ.setdefault(*LARGE_PAGES)
    try:
        code = app(args=arguments, prog_name="k3", standalone_mode=False)
    except UsageError as error:
        misused(error)
    except typer.Abort:
        sys.exit(130)
    except ValueError as error:
        fail(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}")
    else:
        sys.exit(code if isinstance(code, int) else 0)


def misused(error: Any) -> NoReturn:
    """One line for what typer's parser refuses; the help itself where nothing was asked for."""
    said = error.format_message()
    asked = error.ctx.command_path if error.ctx is not None else "k3"
    if type(error).__name__ == "NoArgsIsHelpError":
        print(said, file=sys.stderr)
        sys.exit(2)
    fail(f"{said.rstrip('.')} ({asked} --help tells more)")


def fail(message: str) -> NoReturn:
    """Say in one line what is wrong and exit with code 2."""
    message = "; ".join(line.strip() for line in message.splitlines()).replace(":; ", ": ")
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error[/]: {escape(message)}", highlight=False)
    sys.exit(2)


if __name__ == "__main__":
    main()
