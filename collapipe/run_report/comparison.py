"""The page of several runs: curves, figures, and paired differences of their configurations."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collapipe.formatting import counted
from collapipe.run_report import charts, learning
from collapipe.run_report.comparable import how_tested, how_trained, how_validated
from collapipe.run_report.grouping import Group, grouped
from collapipe.run_report.html import Markup, join, note, table, tag, whole_page
from collapipe.runs.evidence import over_seeds
from collapipe.runs.reading import NO_UPLOADS, Run

_OTHERWISE = "measured differently"
_DECIMALS = 9  # of percent; the others are rounding errors of sums


def _alike(run: Run) -> object:
    """Return how a run measures any figure of the same name: as all runs do."""
    return None


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure by which runs are compared, if ``how`` returns the same for them.

    ``relative`` differences are shown in percent of the reference. ``uploads`` marks modelled
    figures that may exclude uploads.
    """

    name: str
    relative: bool = True
    uploads: bool = False
    how: Callable[[Run], object] = _alike


Measured = Mapping[Measure, Mapping[Path, float]]
"""Values by the folders of the runs that have one."""


def comparison_page(runs: Sequence[Run]) -> str:
    """Return the page that compares runs. Raises ``ConfigError`` if two runs do not differ."""
    groups, known = grouped(runs), _measured(runs)
    title = f"{counted(len(runs), 'run')}, {counted(len(groups), 'configuration')}"
    sections = [
        ("learning", "Learning", _curves(groups)),
        ("figures-table", "Figures", _figures(groups, known)),
        ("pairs", "Differences, paired by seed", _pairs(groups, known)),
        ("runs", "Runs", _runs(groups)),
    ]
    return whole_page(title, _opening(groups), sections)


def _opening(groups: Sequence[Group]) -> Markup:
    """Return the introduction: the groups with their marks, and figures that cannot be compared."""
    rounds = sorted({len(run.rounds) for group in groups for run in group.runs.values()})
    text = "Configurations are named by what differs; runs of one differ by their seed."
    if any(len(group.runs) > 1 for group in groups):
        text += (
            " A curve is the mean over the seeds, in rounds that all of them have; its band is "
            "from the least to the most. Runs without a figure are left out."
        )
    if len(rounds) > 1:
        text += (
            f" Runs have between {rounds[0]} and {rounds[-1]} rounds: totals are not of equal work."
        )
    marks = [
        (join(tag("b", g.mark), " ", g.name, _small(_missing(g))), charts.key(n))
        for n, g in enumerate(groups)
    ]
    without = ", ".join(group.mark for group in groups if _missing(group))
    warning = (
        f"Modelled seconds and joules of {without} leave out uploads, for which the strategy "
        "planned no channel. They are less than what such rounds would take, and are not compared "
        "with those of runs that count uploads."
    )
    return join(
        tag("p", text, class_="state"),
        charts.legend(marks, tall=True),
        note(warning) if without else None,
    )


def _missing(group: Group) -> str:
    """Return a note on uploads missing in the modelled seconds and joules of a group's runs."""
    return next((missing for run in group.runs.values() if (missing := run.missing_uploads)), "")


def _small(text: str) -> Markup | None:
    return join(" ", tag("small", text)) if text else None


def _curves(groups: Sequence[Group]) -> Markup:
    metrics = learning.metric_names(run for group in groups for run in group.runs.values())
    values = [
        ("Training loss", "loss", learning.TRAIN_LOSS),
        ("Validation loss", "loss", learning.EVALUATION_LOSS),
        *((name, name, learning.metric(name)) for name in metrics),
    ]
    return learning.learned(
        (
            title,
            up,
            [learning.Curve(g.mark, n, [*g.runs.values()], of) for n, g in enumerate(groups)],
        )
        for title, up, of in values
    )


def _measured(runs: Sequence[Run]) -> Measured:
    known: dict[Measure, dict[Path, float]] = {}
    for figures in zip(*map(_of_run, runs), strict=True):
        for run, (measure, value) in zip(runs, figures, strict=True):
            if value is not None:
                known.setdefault(measure, {})[run.folder] = value
    return known


def _of_run(run: Run) -> Iterator[tuple[Measure, float | None]]:
    """Yield a run's value of each measure, None if missing, in the same order for every run."""
    rounds, kind, test = run.rounds, run.clock_kind, run.summary.metric if run.summary else None
    tested = Measure(f"test {test.name if test else ''}", relative=False, how=how_tested)
    yield tested, test.value if test else None
    for name, of, how in (
        ("training", learning.TRAIN_LOSS, how_trained),
        ("validation", learning.EVALUATION_LOSS, how_validated),
    ):
        last = next((loss for line in rounds[::-1] if (loss := of(line)) is not None), None)
        yield Measure(f"{name} loss, last", relative=False, how=how), last
    clock = Measure(f"clock, s {kind}", uploads=kind == "modelled")
    yield clock, rounds[-1].clock_s if rounds else None
    delays = [line.cost.delay_s for line in rounds if line.plan.clusters]
    delay_s = sum(delays) / len(delays) if delays else None
    yield Measure("delay of a round, s modelled", uploads=True), delay_s
    joules = sum(line.energy_j for line in rounds) if rounds else None
    yield Measure("energy, J modelled", uploads=True), joules
    yield Measure("MB up"), sum(line.bytes_up for line in rounds) / 1e6 or None
    took = [sum(unit in line.units for line in rounds) for unit in range(run.num_units)]
    least = min(took) / len(rounds) if rounds else None
    yield Measure("least participation, share of rounds", False), least
    queue = max(rounds[-1].queues) if run.keeps_queues else None
    yield Measure("longest queue at the end", False), queue


def _figures(groups: Sequence[Group], known: Measured) -> Markup:
    rows: list[list[object]] = [["seeds", *(_listed(group.runs) for group in groups)]]
    rows += [[each.name, *(_mean(g, each, known[each]) for g in groups)] for each in known]
    explanation = (
        "Mean over seeds, and beneath it its 95 % interval by Student's t; alone it is one seed's. "
        "Runs without a figure are left out of its mean."
    )
    columns = ["", *(group.title for group in groups)]
    return join(table(columns, rows, "Figures of each configuration"), note(explanation))


def _listed(seeds: Iterable[int]) -> str:
    return " ".join(map(str, sorted(seeds))) or "none"


def _values(group: Group, known: Mapping[Path, float]) -> dict[int, float]:
    return {s: known[run.folder] for s, run in group.runs.items() if run.folder in known}


def _mean(group: Group, measure: Measure, known: Mapping[Path, float]) -> object:
    values = _values(group, known)
    missing = _missing(group) if measure.uploads else ""
    ways = [measure.how(group.runs[seed]) for seed in values]
    mixed = _OTHERWISE if any(way != ways[0] for way in ways) else ""
    return join(_with_interval(values.values()), _small(missing or mixed)) if values else "–"


def _with_interval(values: Iterable[float], suffix: str = "", sign: str = "") -> Markup:
    """Return the mean, with its interval below."""
    interval = over_seeds(values)
    ends = [f"{end:{sign}.4g}" for end in (interval.low, interval.high) if end is not None]
    return join(
        f"{interval.mean:{sign}.4g}{suffix}", _small(f"[{', '.join(ends)}]") if ends else None
    )


def _pairs(groups: Sequence[Group], known: Measured) -> Markup:
    """Return a table of each configuration's differences from the first, paired by seed."""
    reference, others = groups[0], groups[1:]
    if not others:
        return note("There is one configuration.")
    common = [_listed(set(group.runs) & set(reference.runs)) for group in others]
    rows: list[list[object]] = [["common seeds", *common]]
    rows += [
        [measure.name, *(_difference(group, reference, measure, values) for group in others)]
        for measure, values in known.items()
    ]
    explanation = (
        f"Each configuration minus the first one, {reference.title}: differences of runs with the "
        "same seed, their mean and its 95 % interval. % is of the first one's figure. Where one of "
        "the two leaves uploads out, or some of them, there is no difference to tell. Losses are "
        "compared if task, data and tokeniser are the same, test metrics if their signatures are."
    )
    columns = ["", *(group.title for group in others)]
    return join(table(columns, rows, "Differences of configurations"), note(explanation))


def _difference(
    group: Group, reference: Group, measure: Measure, known: Mapping[Path, float]
) -> object:
    values, base = _values(group, known), _values(reference, known)
    common = sorted(set(values) & set(base))
    if not common or (measure.relative and not all(base[seed] for seed in common)):
        return "–"
    if any(measure.how(group.runs[n]) != measure.how(reference.runs[n]) for n in common):
        return join("–", _small(_OTHERWISE))
    kinds = {each.runs[seed].missing_uploads for each in (group, reference) for seed in common}
    if measure.uploads and kinds not in ({""}, {NO_UPLOADS}):
        return join("–", _small(NO_UPLOADS))
    if not measure.relative:
        return _with_interval((values[seed] - base[seed] for seed in common), sign="+")
    percent = (100 * (values[n] - base[n]) / base[n] for n in common)
    return _with_interval((round(each, _DECIMALS) for each in percent), " %", "+")


def _runs(groups: Sequence[Group]) -> Markup:
    rows = [
        [
            str(run.folder),
            group.title,
            seed,
            run.summary.status if run.summary else "no end written",
            f"{len(run.rounds)} of {run.planned_rounds}",
            run.version,
        ]
        for group in groups
        for seed, run in group.runs.items()
    ]
    columns = ["folder", "configuration", "seed", "state", "rounds", "version"]
    return table(columns, rows, "Runs", words=True)
