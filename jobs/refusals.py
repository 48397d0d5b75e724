"""What a command says, and with what code it ends, when headrace refuses something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pipeline.errors import HeadraceError


@contextmanager
def refusals() -> Iterator[None]:
    """What headrace refuses is said in a line, and ends the command with its code."""
    try:
        yield
    except HeadraceError as error:
        typer.echo(f"headrace: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
