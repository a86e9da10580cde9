"""``hps``: the command line. One module per command; this one lists them and prints errors.

A command's module is imported when the command runs, so that ``hps --help`` stays fast whatever
the commands need. Every module exposes ``app: typer.Typer``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from hps.errors import ConfigError, HpsError, ModelError, NotFound, TierError, Unauthenticated

OK, FAILED, USAGE = 0, 1, 2
"""Exit codes: done; a check or the work failed; it could not begin: the configuration, a model, the
database or the command line is wrong."""


class CommandEntry(NamedTuple):
    """Panel and help of a command in the overview; ``group``: it has subcommands."""

    panel: str
    help: str
    group: bool = False


START, ASK, CARE = "Start here", "Ask a server", "Models and settings"
COMMANDS = {
    "demo": CommandEntry(START, "Serve the demo model, send requests and check every answer."),
    "serve": CommandEntry(START, "Serve models: hps serve --config FILE (YAML, or HPS's ps.json)."),
    "ingest": CommandEntry(
        START, "Write updates from Kafka into a Redis that several nodes share."
    ),
    "healthcheck": CommandEntry(START, "Check whether the local server is ready; for containers."),
    "doctor": CommandEntry(START, "Check this machine and a deployment; report remedies."),
    "predict": CommandEntry(ASK, "Score one request, or a Parquet, CSV or JSONL file of them."),
    "lookup": CommandEntry(ASK, "Show rows of a table; --explain: also their tier and age."),
    "tables": CommandEntry(ASK, "List the tables: rows, bytes, how much is cached."),
    "status": CommandEntry(ASK, "Show what a server is doing: models, tiers, hit rates."),
    "top": CommandEntry(ASK, "Watch servers: requests, latency, queues, hit rates, freshness."),
    "bench": CommandEntry(ASK, "Measure latency and throughput; compare two runs."),
    "profile": CommandEntry(ASK, "Show the time of each part of a request."),
    "hotkeys": CommandEntry(ASK, "List the hottest keys of a CPU cache, or of a snapshot."),
    "conformance": CommandEntry(
        ASK, "Check that a server conforms to the Open Inference Protocol."
    ),
    "model": CommandEntry(
        CARE, "Import, publish, inspect and verify models of a repository.", group=True
    ),
    "store": CommandEntry(
        CARE, "Inspect and maintain Redis and RocksDB: load, compare, convert.", group=True
    ),
    "generate": CommandEntry(CARE, "Generate models and requests for load tests.", group=True),
    "plan": CommandEntry(CARE, "Size the caches from a key trace: hit rates, latencies, cost."),
    "triton": CommandEntry(CARE, "Export models to a Triton model repository.", group=True),
    "updates": CommandEntry(
        CARE, "Publish rows, control update streams, show dead letters.", group=True
    ),
    "config": CommandEntry(CARE, "Show, check and describe the configuration.", group=True),
    "version": CommandEntry(CARE, "Print the versions of hps and of its dependencies."),
}


def _load(name: str) -> Any:
    app = importlib.import_module(f"hps.cli.{name}").app
    app.rich_markup_mode = None
    command: Any
    if COMMANDS[name].group:
        command = typer.main.get_group(app)
    else:
        command = typer.main.get_command(app)
    for each in command.params:
        if (
            each.param_type_name == "argument" and each.hidden
        ):  # deprecated; click shows it in the usage
            each.get_usage_pieces = lambda _context: []
    command.name = name
    return command


class LazyCommands(TyperGroup):
    """Command group that knows every command's help and imports a command only when it runs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in COMMANDS.items():
            self.add_command(TyperCommand(name, help=entry.help), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name in COMMANDS else command, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for panel in dict.fromkeys(entry.panel for entry in COMMANDS.values()):
            with formatter.section(panel):
                formatter.write_dl([(n, e.help) for n, e in COMMANDS.items() if e.panel == panel])

    def make_context(self, *given: Any, **more: Any) -> Any:
        with _usage_in_one_line():
            return super().make_context(*given, **more)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; convert an ``HpsError`` to lines on stderr and an exit code."""
        try:
            with _usage_in_one_line():
                return super().invoke(ctx)
        except HpsError as error:
            if ctx.params.get("debug"):
                raise
            print_error(error)
            raise typer.Exit(exit_code(error)) from None


# The base class of all command-line errors; typer exports only this subclass.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


@contextmanager
def _usage_in_one_line() -> Iterator[None]:
    """Print a wrong command line as one error line, without click's usage text."""
    try:
        yield
    except _UsageError as error:
        context: Any = getattr(error, "ctx", None)
        message = getattr(error, "format_message", error.__str__)()
        if message.startswith("Usage:"):  # the help of a group without a sub-command
            raise
        from hps.tools.output import print_problem

        words: list[str] = []
        while context is not None and context.parent is not None:
            words.insert(0, context.info_name)
            context = context.parent
        command = " ".join(["hps", *words])
        print_problem(f"{command}: {message.rstrip('.')}; see {command} --help")
        raise typer.Exit(USAGE) from None


def print_error(error: HpsError) -> None:
    """Print an error on stderr: one line, or one per mistake of a configuration."""
    from hps.tools.output import print_problem, problems

    hint = "; give it by --api-key or HPS_API_KEY"
    suffix = hint if isinstance(error, Unauthenticated) else ""
    for mistake in problems(error):
        print_problem(mistake + suffix)


def exit_code(error: HpsError) -> int:
    """Exit code for an error: 2 if the work could not begin, else 1.

    A TierError means that it could not begin: tiers that fail later only degrade answers."""
    begun = not isinstance(error, ConfigError | ModelError | NotFound | TierError)
    return FAILED if begun else USAGE


def _version(wanted: bool) -> None:
    if wanted:
        from hps import __version__

        typer.echo(f"hps {__version__}")
        raise typer.Exit()


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    rich_markup_mode=None,  # rich's help pages take 0.3 s to import
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(
    epilog="New here? Try: hps demo. Exit codes: 0 done, 1 failed (a check, a request), "
    "2 not begun: wrong configuration, model, database or usage."
)
def hps(
    debug: bool = typer.Option(False, "--debug", help="Show Python's traceback of an error."),
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_version, help="Print the version and exit."
    ),
) -> None:
    """Serve embedding tables larger than a GPU, at low latency."""


def main() -> None:
    try:
        app()
    except Exception as error:
        import traceback

        from hps.tools.output import print_problem

        traceback.print_exc()
        if not isinstance(error, HpsError):  # an HpsError gets here only with --debug
            kind = type(error).__name__
            print_problem(
                f"{kind}: a bug in hps; please report it with the above and `hps version`"
            )
        sys.exit(exit_code(error) if isinstance(error, HpsError) else FAILED)


if __name__ == "__main__":
    main()
