"""The page of one run."""

from collapipe.formatting import counted, seconds
from collapipe.run_report.frame import Section, whole_page
from collapipe.run_report.html import Markup, details, join, note, table, tag
from collapipe.run_report.learning import learning
from collapipe.run_report.queues import queues
from collapipe.run_report.resources import energy, traffic
from collapipe.run_report.step import step_chart
from collapipe.run_report.timing import gantt, phases, predicted
from collapipe.run_report.units import participation, radio
from collapipe.runs.metrics import RoundLine
from collapipe.runs.reading import Run

_GROUPS = (
    "experiment",
    "framework",
    "strategy",
    "task",
    "model",
    "environment",
    "cluster",
    "channel",
)


def run_page(run: Run, shown: RoundLine | None) -> str:
    """Everything about one run; ``shown`` is the Gantt chart's round, None: there is none."""
    unknown = "The run has no choices.json, as older ones: groups are named by their classes."
    told = None if run.choices else note(unknown)
    opening = join(tag("p", state(run), class_="state"), facts(run), told)
    return whole_page(f"Run {run.folder.name}", opening, _sections(run, shown))


def _sections(run: Run, shown: RoundLine | None) -> list[Section]:
    return [
        ("learning", "Learning", learning(run)),
        ("units", "Who took part", participation(run)),
        ("round", "A round", _round(run, shown)),
        ("time", "Time of each phase", phases(run)),
        ("predicted", "Predicted and measured", predicted(run)),
        ("queues", "Queues and drift", queues(run)),
        ("radio", "Power and channels", radio(run)),
        ("energy", "Energy", energy(run)),
        ("bytes", "Bytes", traffic(run)),
        ("all", "All rounds, all options", join(_rounds(run), _configuration(run))),
    ]


def _round(run: Run, shown: RoundLine | None) -> Markup:
    if shown is None:
        return note("No round was planned.")
    return join(gantt(shown), step_chart(run, shown))


def state(run: Run) -> str:
    """How far the run came, in a sentence."""
    done = f"{len(run.rounds)} of {counted(run.planned_rounds, 'round')}"
    if run.summary is None:
        return f"No end was written: the run is going on, or it was killed. {done}."
    alone = ", scheduled without training" if run.rounds and not run.trained else ""
    return f"{run.summary.status.capitalize()} after {done}{alone}{run.summary.cause}"


def facts(run: Run) -> Markup:
    """What was run, in a dozen terms."""
    told = {name: text for name, text in _facts(run).items() if text}
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", text)) for name, text in told.items()))


def _facts(run: Run) -> dict[str, str]:
    summary = run.summary
    test = summary.metric if summary else None
    devices, channels = run.option("cluster.num_devices"), run.option("channel.num_channels")
    return {
        **({f"test {test.name}": f"{test.value:.4g}  ({test.signature})"} if test else {}),
        **{name: _chosen(run, name) for name in _GROUPS},
        "units": f"{run.num_units}"
        + (f", {devices} devices each" if devices else "")
        + (f", {channels} channels" if channels else ""),
        "training rows": _shards(list(run.shard_rows.values())),
        "batch": f"{run.option('batch_size')} samples, "
        f"{run.option('federation.local_steps')} local steps a round",
        "seed": str(run.seed),
        "clock": run.clock_text,
        "wall time": f"{seconds(run.rounds[-1].wall_s)}, measured" if run.rounds else "",
        "version": run.version,
        "folder": str(run.folder.resolve()),
    }


def _shards(rows: list[int]) -> str:
    if not rows:
        return ""
    least, most = min(rows), max(rows)
    each = f"{least:,} – {most:,}" if least < most else f"{most:,}"
    return f"{sum(rows):,}, {each} a unit"


def _chosen(run: Run, group: str) -> str:
    """The file that was chosen for a group of options, and its ``name`` where that is another; in
    runs that do not tell the file, the ``name``, or the class of its ``_target_``."""
    choice, options = run.choices.get(group, ""), run.tree.get(group)
    if not isinstance(options, dict):
        return choice
    known = dict.fromkeys(filter(None, (choice, str(options.get("name") or ""))))
    return ", ".join(known) or str(options.get("_target_") or "").rpartition(".")[2]


def _rounds(run: Run) -> Markup:
    columns = ["round", "training loss", "validation loss", "metric", "samples", "units"]
    columns += [
        f"clock, {run.clock.kind}",
        "delay, modelled",
        "measured",
        "energy, modelled",
        "MB up",
        "MB down",
    ]
    rows: list[list[object]] = [
        [
            line.round,
            _number(line.train_loss),
            _number(line.evaluation_loss),
            f"{line.metric.value:.5g}" if line.metric else "–",
            f"{line.samples:,}",
            " ".join(map(str, line.units)) or "–",
            f"{end:,.2f} s",
            f"{line.cost.delay_s:,.2f} s" if line.cost else "–",
            f"{line.seconds.get('round', 0.0):,.2f} s" if run.trained else "–",
            f"{line.energy_j:,.4g} J" if line.energy_j is not None else "–",
            f"{line.bytes_up / 1e6:,.2f}",
            f"{line.bytes_down / 1e6:,.2f}",
        ]
        for line, end in zip(run.rounds, run.clock.ends_s, strict=True)
    ]
    return details(f"Every round as a table ({len(rows)})", table(columns, rows, "Every round"))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"


def _configuration(run: Run) -> Markup:
    text = tag("pre", run.config_text, tabindex="0", role="region", aria_label="config.yaml")
    return details("The configuration, config.yaml", text)
