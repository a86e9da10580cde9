"""``hps``: the command line. One module a command group; this one only gathers them."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Serve embedding tables larger than a GPU.")


def main() -> None:
    app()
