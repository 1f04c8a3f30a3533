"""What the demo shows: live progress on a terminal, one line per step anywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console(highlight=False)
if not console.is_terminal:
    console.width = 110


def heading(text: str) -> None:
    """Starts a part of the demo."""
    console.print(f"\n[bold cyan]● {escape(text)}[/]")


def line(text: str) -> None:
    """Plain text."""
    console.print(escape(text), soft_wrap=True)


@contextlib.contextmanager
def steps(label: str, total: int, left: Callable[[float], str]) -> Iterator[Callable[[str], None]]:
    """Yields a function to call after each of `total` steps, with what to say about it.

    Args:
        left: how long it all still takes, in words, when so much of the steps, 0 to 1, is done.
    """
    if not console.is_terminal:
        done = 0

        def print_step(text: str) -> None:
            nonlocal done
            done += 1
            line(f"{label} {done}/{total}  {text}  ({left(done / total)})")

        yield print_step
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[said]}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=total, said="", left=left(0.0))

        def show_step(text: str) -> None:
            done = progress.tasks[0].completed + 1
            progress.update(task, advance=1, said=text, left=left(done / total))

        yield show_step


@contextlib.contextmanager
def waiting(label: str) -> Iterator[Callable[[str], None]]:
    """Shows that something is going on; yields a function that says what."""
    if not console.is_terminal:
        line(f"{label} ...")
        yield lambda text: None
        return
    with console.status(escape(label)) as status:
        yield lambda text: status.update(f"{escape(label)}  [dim]{escape(text[: console.width - 40])}[/]")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Cells side by side."""
    shown = Table(show_lines=True)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(escape(cell) for cell in row))
    console.print(shown)
