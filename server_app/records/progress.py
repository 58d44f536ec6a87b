"""Show a run's progress: live lines on a terminal, plain lines elsewhere."""

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from collapipe.errors import Called, by_cause, few_of, printable
from collapipe.formatting import counted, print_line, seconds
from collapipe.report import ClusterCost, RoundReport, Score, UnitsEvaluation
from collapipe.step_law import interval
from server_app.evaluation import Evaluated

_log = logging.getLogger(__name__)


class RunProgress:
    """Shows steps, rounds and evaluations; a context manager, since a live display must end.

    Each round prints its exclusions and failures, then one line of figures. The log has the
    pipelines' times. The decoder link's threads call ``step``. With ``tokens``, speed counts input
    tokens, else samples.
    """

    def __init__(
        self,
        console: Console,
        rounds: int,
        steps_per_round: int,
        called: Called,
        tokens: bool = False,
    ) -> None:
        self._console, self._lock, self._called = console, threading.Lock(), called
        self._excluded = dict[int, str]()  # in the previous round
        self._restart()
        self._tokens, self._per_s = tokens, "tokens/s" if tokens else "samples/s"
        self._rounds, self._steps = rounds, steps_per_round
        self._skipped: str | None = None
        self._live = Progress(
            TextColumn("round {task.fields[round]}/{task.fields[rounds]}"),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("· loss {task.fields[loss]} · {task.fields[metric]}"),
            TextColumn(f"· {{task.fields[speed]}} {self._per_s} ·"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),  # only the bar shrinks
            console=console,
            disable=not console.is_terminal,
        )
        total, metric = rounds * steps_per_round, "no metric yet"
        self._task = self._live.add_task(
            "train", total=total, round=1, rounds=rounds, loss="–", speed="–", metric=metric
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        print_line(self._live.console, text)

    def step(self, unit: int, step: int, loss: float, samples: int, tokens: int) -> None:
        """Show that a unit has finished a step."""
        with self._lock:
            self._done += tokens if self._tokens else samples
            speed = self._done / (time.perf_counter() - self._start)
        self._live.update(self._task, advance=1, loss=f"{loss:.3f}", speed=f"{speed:,.0f}")

    def _restart(self) -> None:
        """Restart the count of the speed, so that time between rounds does not count."""
        with self._lock:
            self._done, self._start = 0, time.perf_counter()

    def round(self, report: RoundReport, wall_s: float) -> None:
        """Show that a round is finished."""
        speed = (report.input_tokens if self._tokens else report.samples) / wall_s
        loss = "–" if report.train_loss is None else f"{report.train_loss:.4f}"
        self._live.update(
            self._task,
            completed=report.round * self._steps,
            round=min(report.round + 1, self._rounds),
            loss=loss,
            speed=f"{speed:,.0f}",
        )
        self._restart()
        for line in self._incidents(report):
            self.print_line(f"round {report.round}: {line}")
        self._excluded, self._skipped = dict(report.excluded), report.skipped
        for unit, cost in report.costs.items():
            how = _pipeline(cost, report.pipeline_s.get(unit))
            _log.info("round %d: %s: %s", report.round, self._called(unit), how)
        if not self._console.is_terminal and report.train_loss is not None:
            self.print_line(
                f"round {report.round}/{self._rounds}  train loss {loss}  "
                f"{speed:,.0f} {self._per_s}  {wall_s:.1f} s"
            )

    def _incidents(self, report: RoundReport) -> Iterator[str]:
        """Yield new exclusions, the reason of a skipped round, failures, and devices' events."""
        new = {u: cause for u, cause in report.excluded.items() if self._excluded.get(u) != cause}
        for units, cause in by_cause(new, self._called):
            yield f"excluded {units}: {cause}"
        if report.skipped is not None:
            again = report.skipped == self._skipped
            yield f"skipped: {'for the same reason' if again else printable(report.skipped)}"
        for units, cause in by_cause(report.failures, self._called):
            yield f"ended without {units}: {cause}"
        for unit, events in report.events.items():
            yield from (f"{self._called(unit)}: {printable(event)}" for event in events)

    def evaluation(self, round_: int, evaluated: Evaluated) -> None:
        """Show an evaluation of the model."""
        self._restart()
        where = f"round {round_}/{self._rounds}"
        if evaluated.first is not None:
            self._live.update(self._task, metric=shown(evaluated.first.score))
        if (found := evaluated.server) is not None:
            self.print_line(f"{where}  evaluation loss {found.loss:.4f}  {shown(found.score)}")
        for line in evaluation_lines(evaluated.units, self._called) if evaluated.units else ():
            self.print_line(f"{where}  {line}")


def _pipeline(cost: ClusterCost, measured_s: float | None) -> str:
    """Describe the modelled seconds of a unit's pipeline and, on real devices, measured ones."""
    planned = seconds(cost.pipeline_s)
    if not measured_s:
        return f"pipeline of {planned}, modelled"
    if cost.spread:
        planned += f" ({' … '.join(map(seconds, interval(cost.pipeline_s, cost.spread)))})"
    ratio = measured_s / (cost.pipeline_s or math.inf)
    return f"pipeline took {seconds(measured_s)}, {ratio:.2f} times the planned {planned}"


def evaluation_lines(units: UnitsEvaluation, called: Called) -> Iterator[str]:
    """Yield lines on an evaluation on units: the figures, then some units without rows or with
    failures."""
    if units.metric is None:
        yield "no evaluation on units: no unit sent results"
    else:
        held = [rows for rows in units.rows.values() if rows]
        counts = f"on {counted(sum(held), 'row')} of {counted(len(held), 'unit')}"
        yield f"evaluation loss {units.loss:.4f}  {shown(units.metric)}  {counts}"
    if without := [called(unit) for unit, rows in units.rows.items() if not rows]:
        yield f"no rows to evaluate on: {few_of(without, ', ')}"
    for names, cause in by_cause(units.failures, called):
        yield f"evaluated without {names}: {cause}"


def shown(score: Score) -> str:
    """Format a score, such as ``accuracy 0.781  macro-F1 0.764``."""
    values = {score.name: score.value, **score.extra_metrics}
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def end_table(rows: Sequence[tuple[str, str]]) -> Table:
    """Build the short table at the end of a run."""
    table = Table(
        Column(), Column(overflow="fold"), show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    for name, value in rows:
        table.add_row(Text(name), Text(printable(value)))  # a value may look like markup
    return table
