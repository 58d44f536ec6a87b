"""``collapipe report``: read the folders and write the page of one run, or of several."""

from collections.abc import Callable, Sequence
from pathlib import Path
from stat import S_IMODE

from collapipe.errors import ConfigError, printable
from collapipe.formatting import counted, seconds
from collapipe.process.files import replacing
from collapipe.report import RoundReport
from collapipe.run_report import html
from collapipe.run_report.comparison import comparison_page
from collapipe.run_report.costs import energy, phases, predicted, traffic
from collapipe.run_report.devices import devices
from collapipe.run_report.learning import learning
from collapipe.run_report.privacy import privacy
from collapipe.run_report.round import gantt, step_chart
from collapipe.run_report.units import participation, queues, radio
from collapipe.runs.reading import Run, latest_run, read_run

_HEAD = 2000  # characters of a page that contain its generator's name
_GROUPS = (
    *("experiment", "framework", "strategy", "task"),
    *("model", "environment", "cluster", "channel"),
)


def write_report(folders: Sequence[Path], output: Path | None, number: int | None) -> None:
    """Write the report of a run (default: the latest) or a comparison of several; print its path.

    ``number`` is the round of the Gantt chart, by default the last planned one. Raises
    ``ConfigError`` for a folder without a run, or if ``output`` exists and is not a report.
    """
    runs = [read_run(folder) for folder in folders or [latest_run()]]
    if len(runs) == 1:
        file = output or runs[0].folder / "report.html"
        page = run_page(runs[0], _shown(runs[0], number))
    elif number is not None:
        raise ConfigError(f"--round {number}: is drawn for one run, not for {len(runs)}; name one")
    else:
        file = output or Path("report.html")
        page = comparison_page(runs)
    _write(file, page)
    print(printable(str(file)))


def _shown(run: Run, number: int | None) -> RoundReport | None:
    planned = {line.round: line for line in run.rounds if line.plan.clusters}
    held = f"{min(planned)} … {max(planned)}" if planned else "none"
    if number is not None and number not in planned:
        raise ConfigError(
            f"--round {number}: {run.folder} has no plan of it; planned rounds: {held}"
        )
    return planned[max(planned) if number is None else number] if planned else None


def _write(file: Path, page: str) -> None:
    try:
        if file.is_symlink():  # a link in an untrusted folder may lead anywhere
            raise ConfigError(f"{file}: is a link; choose another --output")
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ConfigError(f"{file}: is no file; choose another --output")
        mode = 0o666
        if file.exists():
            mode = S_IMODE(file.stat().st_mode)
            with file.open(encoding="utf-8", errors="replace") as old:
                if html.GENERATOR not in old.read(_HEAD):
                    raise ConfigError(
                        f"{file}: exists and is not a report; choose another --output"
                    )
        # Texts of a run may have lone surrogates, which cannot be encoded.
        with replacing(file, mode) as partial:
            partial.write_bytes(page.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror}); choose another --output"
        ) from error


def run_page(run: Run, shown: RoundReport | None) -> str:
    """Return the page of one run; ``shown`` is the round of the Gantt chart, None for no chart."""
    facts = [
        html.tag("div", html.tag("dt", name), html.tag("dd", text))
        for name, text in _facts(run).items()
        if text
    ]
    opening = (
        html.tag("p", _state(run), class_="state"),
        html.tag("dl", *facts),
    )
    a_round = html.note("No round was planned.")
    if shown:
        a_round = html.join(gantt(run, shown), step_chart(run, shown))
    text = html.tag("pre", run.config_text, tabindex="0", role="region", aria_label="config.yaml")
    configuration = html.details("The configuration, config.yaml", text)
    real, read = devices(run), privacy(run)
    unknown = None if run.rounds else html.note("No round was finished.")
    sections = [
        ("learning", "Learning", learning(run)),
        ("units", "Who took part", participation(run)),
        ("round", "A round", a_round),
        ("time", "Time of each phase", phases(run)),
        ("predicted", "Predicted and measured", predicted(run)),
        *([("devices", "Devices, measured", real)] if real else []),
        ("queues", "Queues and drift", unknown or queues(run)),
        ("radio", "Power and channels", unknown or radio(run)),
        ("energy", "Energy", energy(run)),
        ("bytes", "Bytes", traffic(run)),
        *([("privacy", "What the server could read", read)] if read else []),
        ("all", "All rounds, all options", html.join(_rounds(run), configuration)),
    ]
    return html.whole_page(f"Run {run.folder.name}", html.join(*opening), sections)


def _state(run: Run) -> str:
    done = f"{len(run.rounds)} of {counted(run.planned_rounds, 'round')}"
    if run.summary is None:
        return f"No end was written: the run is going on, or it was killed. {done}."
    alone = ", scheduled without training" if run.rounds and not run.trained else ""
    return f"{run.summary.status.capitalize()} after {done}{alone}{run.summary.cause}"


def _facts(run: Run) -> dict[str, str]:
    summary = run.summary
    test = summary.metric if summary else None
    rows = run.shard_rows.values()
    each = f"{min(rows):,} – {max(rows):,}" if len({*rows}) > 1 else f"{max(rows, default=0):,}"
    return {
        **({f"test {test.name}": f"{test.value:.4g}  ({test.signature})"} if test else {}),
        **{name: _chosen(run, name) for name in _GROUPS},
        "units": f"{run.num_units:,}",
        "devices each": str(run.option("cluster.num_devices") or ""),
        "channels": str(run.option("channel.num_channels") or ""),
        "training rows": f"{sum(rows):,}, {each} a unit" if rows else "",
        "samples of a batch": str(run.option("batch_size")),
        "local steps a round": str(run.option("federation.local_steps")),
        "seed": str(run.seed),
        "clock": run.clock_text,
        "wall time": f"{seconds(run.rounds[-1].wall_s)}, measured" if run.rounds else "",
        "version": run.version,
        "folder": str(run.folder.resolve()),
    }


def _chosen(run: Run, group: str) -> str:
    """Return the chosen file of a group of options, with its ``name`` if that differs."""
    choice, options = run.choices.get(group, ""), run.tree.get(group)
    name = str(options.get("name") or "") if isinstance(options, dict) else ""
    return ", ".join(dict.fromkeys(filter(None, (choice, name))))


def _rounds(run: Run) -> html.Markup:
    cells: dict[str, Callable[[RoundReport], str]] = {
        "round": lambda line: str(line.round),
        "training loss": lambda line: _formatted(line.train_loss, ".5g"),
        "validation loss": lambda line: _formatted(line.evaluation_loss, ".5g"),
        "metric": lambda line: _formatted(line.metric.value if line.metric else None, ".5g"),
        "samples": lambda line: f"{line.samples:,}",
        "units": lambda line: ", ".join(map(run.called, line.units)) or "–",
        f"clock, {run.clock_kind}": lambda line: f"{line.clock_s:,.2f} s",
        "delay, modelled": lambda line: f"{line.cost.delay_s:,.2f} s",
        "measured": lambda line: _formatted(
            line.seconds.get("round", 0.0) if run.trained else None, ",.2f", " s"
        ),
        "energy, modelled": lambda line: f"{line.energy_j:,.4g} J",
        "MB up": lambda line: f"{line.bytes_up / 1e6:,.2f}",
        "MB down": lambda line: f"{line.bytes_down / 1e6:,.2f}",
    }
    rows = [[cell(line) for cell in cells.values()] for line in run.rounds]
    return html.details(
        f"Every round as a table ({len(rows)})", html.table([*cells], rows, "Every round")
    )


def _formatted(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"
