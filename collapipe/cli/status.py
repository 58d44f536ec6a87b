"""``collapipe status``: show a run's progress from its folder, or a deployed federation's units."""

import math
import time
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from collapipe.errors import by_cause, one_line, printable
from collapipe.formatting import counted, print_lines, print_table, seconds
from collapipe.report import RoundReport
from collapipe.runs import reading
from collapipe.runs.folder import is_writing

_RECENT = 10  # number of rounds from which the remaining time is estimated
_FILES = ("config.yaml", "metrics.jsonl", "summary.json")
Line = tuple[str, str]


def show_status(folder: Path | None) -> None:
    """Print the state of a run, by default the latest one, on one screen.

    Raises ``ConfigError`` if the folder is not a run's.
    """
    print_lines(Console(), describe(reading.read_run(folder or reading.latest_run()), time.time()))


def show_deployment(folder: Path) -> None:
    """Print the units of a deployed federation, and the progress of its current runs.

    Raises ``ConfigError`` if the folder is not a server's, and ``LinkError`` if the server does not
    run.
    """
    from collapipe.deployment.overview import overview  # takes seconds
    from collapipe.deployment.server_folder import ServerFolder

    units, runs = overview(ServerFolder(folder.resolve()))
    now_s, console = time.time(), Console()
    rows = [
        [each.name, each.state, "" if each.since_s is None else _ago(now_s - each.since_s)]
        for each in units
    ]
    print_table(console, ["unit", "state", "since"], rows)
    console.print()
    for each in runs:
        lines = [("run", f"{each.number}: {each.state}; its folder is not known here")]
        if each.folder is not None and (each.folder / "config.yaml").exists():
            lines = describe(reading.read_run(each.folder), now_s)
        print_lines(console, lines)
    if not runs:
        print_lines(console, [("run", "none under way")])


def describe(run: reading.Run, now_s: float) -> list[Line]:
    """Return labels and texts; ``now_s`` is the current ``time.time()``."""
    last = run.rounds[-1] if run.rounds else None
    return [
        ("run", _state(run, now_s)),
        ("folder", printable(str(run.folder))),
        ("round", _progress(run)),
        *_results(run),
        *(_units(run, last) if last else []),
        *(_devices(run, last) if last else []),
        *(_checkpoint(run.folder, now_s)),
    ]


def _span_s(run: reading.Run) -> float | None:
    """Return the mean measured time from one round's end to the next, over the latest rounds."""
    ends = [0.0, *(line.wall_s for line in run.rounds)][-_RECENT - 1 :]
    gaps = [after - before for before, after in pairwise(ends)]
    return math.fsum(gaps) / len(gaps) if gaps else None


def _state(run: reading.Run, now_s: float) -> str:
    files = [*(run.folder / name for name in _FILES), *run.folder.glob("checkpoints/[0-9]*")]
    written = f"last written {_ago(now_s - max(map(reading.modified_s, files)))}"
    if run.summary:
        return f"{printable(run.summary.status)}{run.summary.cause}, {written}"
    if not is_writing(run.folder):
        return f"killed, {written}; {reading.how_to_go_on(run.folder)}"
    return f"{'running' if run.rounds else 'not started a round'}, {written}"


def _progress(run: reading.Run) -> str:
    done = run.rounds[-1].round if run.rounds else 0
    text = f"{done} of {run.planned_rounds}"
    each = _span_s(run)
    if each is None or run.summary or not is_writing(run.folder):
        return text
    left = max(0, run.planned_rounds - done)
    return f"{text}, about {_duration(left * each)} left at {seconds(each)} a round"


def _results(run: reading.Run) -> list[Line]:
    lines = []
    trained = [line for line in run.rounds if line.train_loss is not None]
    evaluated = [line for line in run.rounds if line.metric]
    if trained:
        lines.append(("train loss", f"{trained[-1].train_loss:.4f} (round {trained[-1].round})"))
    if evaluated and (score := evaluated[-1].metric):
        text = f"{score.value:.4g} (round {evaluated[-1].round})"
        if evaluated[-1].evaluation_loss is not None:
            text += f", evaluation loss {evaluated[-1].evaluation_loss:.4f}"
        lines.append((printable(score.name)[:11], text))
    if run.summary and (metric := run.summary.metric):
        lines.append(("test", f"{one_line(metric.name)} {metric.value:.4g}"))
    if run.rounds:
        lines.append(("clock", run.clock_text))
    return lines


def _units(run: reading.Run, last: RoundReport) -> list[Line]:
    """Return how many units trained or took part in the last round, and why others did not."""
    scheduled = counted(len(last.plan.clusters), "scheduled unit")
    result = f"{len(last.units)} of {scheduled} {'trained' if run.trained else 'took part'}"
    if last.skipped:
        result = f"round skipped: {printable(last.skipped)}"
    causes = (("failed", last.failures), ("excluded", last.excluded))
    return [("units", result)] + [
        (what, f"{units}: {why}")
        for what, failures in causes
        for units, why in by_cause(failures, run.called)
    ]


def _devices(run: reading.Run, last: RoundReport) -> list[Line]:
    """Return each real device's work in the last round, and its events."""
    lines = [
        (
            "device",
            f"{printable(each.name)} of {run.called(unit)}: {counted(each.blocks, 'block')}, "
            f"computed {seconds(each.compute_s)}, waited {seconds(each.wait_s)}",
        )
        for unit, devices in last.devices.items()
        for each in devices
    ]
    reported = ((unit, event) for unit, events in last.events.items() for event in events)
    return lines + [
        ("event", f"{run.called(unit)}: {printable(event)}") for unit, event in reported
    ]


def _checkpoint(folder: Path, now_s: float) -> list[Line]:
    if not (found := reading.checkpoints(folder)):
        return []
    age = _ago(now_s - reading.modified_s(found[-1]))
    return [("checkpoint", f"of round {int(found[-1].name)}, {age}")]


def _ago(elapsed_s: float) -> str:
    return f"{_duration(max(0.0, elapsed_s))} ago"


def _duration(span: float) -> str:
    """Return a time in whole seconds, minutes or hours."""
    if span < 120:
        return f"{math.ceil(span)} s"
    if span < 7200:
        return f"{span / 60:.0f} min"
    return f"{span / 3600:.1f} h"
