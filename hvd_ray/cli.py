"""`hvd`: puts the commands together and turns a user's mistake into one line and exit code 2."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from hvd_ray import __version__
from hvd_ray.errors import UserError

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
    "ui",
    "bench",
    "report",
    "demo",
)


def main(args: Sequence[str] | None = None) -> None:
    """Run `hvd` and exit: 0 done, 1 a check failed, 2 a user's mistake, 130 interrupted.

    Anything that is not a `UserError` is a fault of ours and keeps its traceback.
    """
    try:
        build_app()(args=args)
    except UserError as error:
        print(f"hvd: error: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def build_app() -> typer.Typer:
    """The command line with every module of `COMMAND_MODULES` registered."""
    app = typer.Typer(
        name="hvd",
        help="Hybrid verified decoding for LLMs: faster answers, exactly the same tokens.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in COMMAND_MODULES:
        import_module(f"hvd_ray.commands.{name}").register(app)
    return app


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


def _one_line(error: UserError) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    main()
