"""`hvd`: puts the commands together and turns a user's mistake into one line and exit code 2."""

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from hvd_ray import __version__
from hvd_ray.addresses import with_local_paths
from hvd_ray.errors import UserError
from hvd_ray.number_options import with_checked_numbers

# In the order in which `hvd --help` shows them.
COMMAND_MODULES = (
    "fetch",
    "doctor",
    "calibrate",
    "traces",
    "train",
    "tune",
    "promote",
    "drafter",
    "plan",
    "slim",
    "serve",
    "ui",
    "advise",
    "bench",
    "report",
    "demo",
)

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def main(args: Sequence[str] | None = None) -> None:
    """Run `hvd` and exit: 0 done, 1 a check failed, 2 a user's mistake, 130 interrupted.

    Anything that is neither a `UserError` nor wrong usage is a fault of ours and keeps its
    traceback.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # a path need not be text; never die of showing it
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        words = with_local_paths(sys.argv[1:] if args is None else args)
        code = get_command(build_app()).main(args=words, prog_name="hvd", standalone_mode=False)
    except UserError as error:
        refuse(str(error))
    except TyperException as error:
        _refuse_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code or 0)


def refuse(message: str) -> NoReturn:
    """Say in one line what the user can mend, and exit with 2."""
    line = _CONTROL.sub("?", " ".join(message.split()))  # a path may hold terminal commands
    print(f"hvd: error: {line}", file=sys.stderr)
    sys.exit(2)


def _refuse_usage(error: TyperException) -> NoReturn:
    """Wrong usage in one line, and where to read more; help alone has no message."""
    in_full = getattr(error, "format_message", error.__str__)  # names the option at fault
    message, context = in_full(), getattr(error, "ctx", None)
    if not message:
        sys.exit(2)
    where = context.command_path if context else "hvd"
    refuse(f"{message.rstrip('.')}; see `{where} --help`")


def build_app() -> typer.Typer:
    """The command line with every module of `COMMAND_MODULES` registered."""
    app = typer.Typer(
        name="hvd",
        help="Hybrid verified decoding for LLMs: faster, the same tokens (exactly so in float32).",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in COMMAND_MODULES:
        import_module(f"hvd_ray.commands.{name}").register(app)
    return with_checked_numbers(app)


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=lambda given: _show_version(given), is_eager=True),
    ] = False,
) -> None:
    del version  # handled by its eager callback


def _show_version(given: bool) -> None:
    if given:
        print(f"hvd {__version__}")
        raise typer.Exit


if __name__ == "__main__":
    main()
