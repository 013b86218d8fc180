"""Prints a line that may quote what others wrote: a run's records, a platform's words, a job's output."""

import typer

from composer_prime.visible import MAX_MESSAGE, visible


def say(line: object, err: bool = False) -> None:
    """One line on standard output, or standard error, with its controls spelled."""
    typer.echo(visible(line, MAX_MESSAGE), err=err)
