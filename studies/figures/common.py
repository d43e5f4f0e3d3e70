"""What a reproduced figure is, and the options that all of them take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eldr_serve.routing import StepCost
from tools.cli import BadInput
from tools.progress import progress_bar

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """What the command was given.

    Attributes:
        traces: a calibration trace (eldr), or request traces (balanceroute).
        cost: of a decode step; None: the figure's own.
        requests: per run; None: the figure's own.
        seeds: repetitions.
    """

    traces: tuple[Path, ...] = ()
    cost: StepCost | None = None
    requests: int | None = None
    seeds: tuple[int, ...] = (0,)

    def trace(self, what: str) -> Path:
        """The one trace; BadInput, saying `what` it must be, if there is none."""
        if len(self.traces) != 1:
            raise BadInput(f"give one --trace: {what}")
        return self.traces[0]


@dataclass(frozen=True)
class Figure:
    """One figure or table.

    Attributes:
        title: one line.
        paper: what the paper reports there, in words or figures.
        run: makes the rows.
        plot: draws them.
    """

    title: str
    paper: str
    run: Callable[[Options], Rows]
    plot: Callable[[Rows, Path], None] | None = None


class Steps:
    """A progress bar over known steps."""

    def __init__(self, total: int) -> None:
        self._progress = progress_bar()
        self._bar = self._progress.add_task("", total=total)

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def done(self, description: str) -> None:
        """One more step is done."""
        self._progress.update(self._bar, advance=1, description=description)


def change_pct(value: float, reference: float) -> float:
    """How much above the reference, %."""
    return 100 * (value / reference - 1)
