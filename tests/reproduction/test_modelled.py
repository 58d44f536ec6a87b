"""The paper's figures: their files, their repeatability and the consistency of their numbers."""

import contextlib
import csv
import functools
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from scipy import stats

from collapipe.runs.evidence import Interval, over_seeds
from reproduction import (
    command,
    fig04,
    fig05,
    fig07_fig08,
    fig11,
    figure,
    frameworks,
    paper_world,
    spreads,
)
from reproduction.drawing import MARKS
from reproduction.figure import above, near, share_over_seeds
from tests.optim.laws import pipeline_latency

FIGURES = (
    *("fig04", "fig05"),
    *(
        pytest.param(each, marks=pytest.mark.thorough)
        for each in ("fig07", "fig08", "fig11", "frameworks", "spreads")
    ),
)
SEEDS = 2
Run = Callable[..., tuple[int, str, str]]
Written = Callable[[str], tuple[Path, str]]


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Figures of a few clusters and rounds, computed in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fig04, "CLUSTERS", 2)
        patch.setattr(fig05, "CLUSTERS", 8)
        patch.setattr(spreads, "CLUSTERS", 3)
        patch.setattr(fig11, "ROUNDS", 3)
        worlds = ("jitter, activations too", "fading, adapters")
        slow = "eq. 32 as printed"  # the planner's tests check its powers
        runs = {
            (world, how): run
            for (world, how), run in fig11.RUNS.items()
            if world not in worlds and slow not in how
        }
        patch.setattr(fig11, "RUNS", runs)
        patch.setattr(
            fig11, "WORLDS", {w: fig11.WORLDS[w] for w in fig11.WORLDS if w not in worlds}
        )
        patch.setattr(fig11, "PAPER_ROUNDS", 1)
        one = ("federation.num_units=1",)
        solvers = {name: (one, how) for name, (_, how) in fig11.SOLVERS.items()}
        patch.setattr(fig11, "SOLVERS", solvers)
        patch.setattr(frameworks, "ROUNDS", 1)
        patch.setattr(frameworks, "FACTORS", (1.0,))
        patch.setattr(frameworks, "PAYLOADS", {"int4": ("compression.activation=int4",)})
        patch.setattr(frameworks, "ENVIRONMENTS", ("static",))
        patch.setattr(fig07_fig08, "ROUNDS", 2)
        patch.setattr(fig07_fig08, "CLUSTERS", 2)
        patch.setattr(command, "_DPI", 20)
        patch.setattr(figure, "PROCESSES", 1)
        patch.setenv("COLUMNS", "80")
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write a figure of ``SEEDS`` seeds once; return its folder and the command's output."""

    @functools.cache
    def write(name: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(name) / "a" / "new folder"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            command.reproduce(name, SEEDS, folder)
        return folder, out.getvalue()

    return write


def record(folder: Path, figure: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{figure}.json").read_text())
    return found


def table(folder: Path, figure: str) -> list[dict[str, str]]:
    with (folder / f"{figure}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def figures_of(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {each["text"]: each["ours"] for each in [*found["claims"], *found["findings"]]}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_written_with_its_claims(name: str, written: Written) -> None:
    folder, _ = written(name)
    assert {file.name for file in folder.iterdir()} == {
        f"{name}.{suffix}" for suffix in ("csv", "json", "png", "svg")
    }
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = "".join(ElementTree.fromstring((folder / f"{name}.svg").read_text()).itertext())
    assert any(unit in text for unit in (" s]", "[s]", "[%]"))
    found = record(folder, name)
    assert found["provenance"]["command"] == f"python -m reproduction {name} --seeds {SEEDS}"
    assert found["provenance"]["seeds"] == list(range(SEEDS))
    assert found["provenance"]["presets"]["cluster"]["relative_speed"] == [0.1, 0.8]
    assert found["claims"]
    for claim in found["claims"]:
        assert isinstance(claim["agrees"], bool)
        assert claim["rule"]
        assert claim["paper"] not in ("", None)
        assert claim["ours"]["low"] <= claim["ours"]["mean"] <= claim["ours"]["high"]


@pytest.mark.parametrize("name", FIGURES)
def test_a_seed_gives_the_same_rows_without_the_other_seeds(name: str, written: Written) -> None:
    (chosen,) = command._CHOICES[name]
    again = [list(map(str, row)) for row in chosen.rows(1, chosen.compute(1))]
    rows = table(written(name)[0], name)
    assert again == [list(row.values()) for row in rows if row["seed"] == "1"]
    others = [{**row, "seed": "1"} for row in rows if row["seed"] == "0"]
    assert again != [list(row.values()) for row in others]


def test_the_same_seeds_give_the_same_files_and_replace_old_ones(
    written: Written, reproduce: Run, tmp_path: Path
) -> None:
    (tmp_path / "fig08.csv").write_text("old")
    (tmp_path / "notes.txt").write_text("kept")
    status, out, err = reproduce("fig08", "--seeds", SEEDS, "--output", tmp_path)
    assert (status, err) == (0, ""), out
    for name in ("fig08.csv", "fig08.json"):
        assert (tmp_path / name).read_bytes() == (written("fig08")[0] / name).read_bytes()
    assert (tmp_path / "notes.txt").read_text() == "kept"


def test_one_seed_has_no_interval() -> None:
    assert fig04.FIGURE.evidence((0,)).claims[0].ours.low is None


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        (["fig4"], r"\bfig4\b.*\bfig04\b.*\bremark2\b.*\bmodelled\b.*\ball\b"),
        (["fig04", "--seeds", "0"], r"--seeds 0\b.*\b1\b"),
        (["fig04", "--output", "file/folder"], "--output file/folder: "),
        (["fig04", "--output", "file"], "--output file: "),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str],
    numbers: str,
    reproduce: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("no folder")
    status, out, err = reproduce(*arguments)
    assert (status, out) == (2, "")
    assert re.fullmatch(f"error: .*{numbers}.*\n", err)


def test_a_file_that_cannot_be_written_is_named(reproduce: Run, tmp_path: Path) -> None:
    (tmp_path / "fig04.png").mkdir()
    status, _, err = reproduce("fig04", "--seeds", 1, "--output", tmp_path)
    assert status == 2
    assert err.count("\n") == 1
    assert f"{tmp_path}/fig04.png" in err


def test_the_interval_is_students_t_interval() -> None:
    values = [3.0, 4.5, 4.0, 7.0, 1.0]
    ours = over_seeds(values)
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert (ours.mean, ours.low, ours.high) == pytest.approx((np.mean(values), low, high))


def test_the_interval_of_a_share_is_within_0_and_100_percent() -> None:
    assert over_seeds([95.0, 100.0]).ends[1] > 100
    assert share_over_seeds([95.0, 100.0]).ends[1] == 100
    assert share_over_seeds([0.0, 5.0]).ends[0] == 0
    assert share_over_seeds([5.0]) == Interval(5.0, None, None)


def test_a_number_and_its_unit_are_on_one_line(written: Written) -> None:
    out = written("fig05")[1]
    assert len(re.findall(r"\(\S+ … \S+\) (?:%|micro-batches) ", out)) == out.count("…")
    assert max(map(len, out.splitlines()[:-1])) <= 80


@pytest.mark.parametrize(
    ("mean", "agrees"), [(7.4, False), (7.6, True), (12.4, True), (12.6, False)]
)
def test_a_number_agrees_if_it_is_within_a_quarter_of_the_papers(mean: float, agrees: bool) -> None:
    wide = Interval(mean, mean - 20, mean + 20)
    assert near("a reduction", 10, wide, "%").agrees == agrees


def test_a_property_holds_only_if_it_holds_for_the_whole_interval() -> None:
    for low, agrees in ((-0.1, False), (0.0, True)):
        claim = above("a rise", "rises", Interval(1, low, 2), "%", 0, or_equal=True)
        assert claim.agrees == agrees


def test_latencies_of_even_splits_follow_eq_15() -> None:
    devices = paper_world.paper_presets().devices(0, "here")
    fastest = sorted(devices, key=lambda device: device.time.u)[:4]
    seconds = fig04.latencies(devices)
    assert seconds.shape == (6, 64)
    # Six blocks on four devices: two, two, one, one.
    chunks = [
        held * (device.time.u * 64 / 10 + device.time.v) + device.time.ell
        for held, device in zip((2, 2, 1, 1), fastest, strict=True)
    ]
    assert seconds[3, 9] == pytest.approx((4 + 10 - 1) * max(chunks))
    assert fig04.best(seconds, range(1, 7)) == tuple(np.argwhere(seconds == seconds.min())[0] + 1)
    # The paper's splits: S divides the six blocks.
    divisors = [each for each in range(1, 7) if 6 % each == 0]
    least = seconds[np.array(divisors) - 1].min()
    segments, micro_batches = fig04.best(seconds)
    assert segments in divisors
    assert seconds[segments - 1, micro_batches - 1] == least


def test_chunks_and_energy_of_an_optimum_follow_from_the_devices_laws() -> None:
    cluster = paper_world.draw_cluster(12, 0, "here")
    best = paper_world.solve("exact", cluster, np.random.default_rng(0))[0].best
    size, pairs = 64 / best.num_micro_batches, list(zip(cluster.devices, best.blocks, strict=True))
    chunks = [n * (d.time.u * size + d.time.v) + d.time.ell for d, n in pairs if n]
    joules = [
        n * (d.energy.law.u * size + d.energy.law.v) + d.energy.law.ell
        for d, n in pairs
        if n and d.energy
    ]
    ratio, most, spent = fig05._chunks_and_energy(cluster, best)
    assert ratio == pytest.approx(max(chunks) / min(chunks))
    assert (most, spent) == (max(best.blocks), pytest.approx(best.num_micro_batches * max(joules)))
    assert max(joules) <= 5  # C9' bounds the energy of one micro-batch


def test_a_spread_narrows_ranges_around_their_middle_and_1_changes_nothing() -> None:
    cluster = paper_world.paper_presets().cluster
    assert paper_world.narrowed(1.0).cluster == cluster
    for spread, width in ((0.0, 0.0), (0.5, 0.35)):
        low, high = paper_world.narrowed(spread).cluster.relative_speed
        assert (high - low, (low + high) / 2) == pytest.approx((width, 0.45))
    times = {device.time for device in paper_world.narrowed(0.0).devices(0)}
    assert len(times) == 1


def test_an_even_split_on_the_fastest_devices_is_no_slower_than_on_others() -> None:
    cluster = paper_world.draw_cluster(12, 0, "here")
    fastest_s = spreads.even_on_fastest_s(cluster, 3, 8)
    others = itertools.permutations(cluster.devices, 3)
    found = [pipeline_latency(chosen, (4, 4, 4), 64, 8, "bound") for chosen in others]
    # Hops differ a little, too; the choice of devices ignores them.
    assert fastest_s == pytest.approx(min(found), rel=0.05)
    assert max(found) > 1.5 * fastest_s


def test_no_even_split_beats_the_optimum(written: Written) -> None:
    folder, _ = written("fig05")
    rows = table(folder, "fig05")
    assert len(rows) == 8 * SEEDS
    assert all(float(row["latency_s"]) <= float(row["even_latency_s"]) for row in rows)
    shares = [
        ours["mean"]
        for text, ours in figures_of(record(folder, "fig05")).items()
        if text.startswith("clusters whose best S is") and "," not in text
    ]
    assert sum(shares) == pytest.approx(100)


def test_reductions_follow_from_the_table(written: Written) -> None:
    folder, _ = written("fig08")
    rows, found = table(folder, "fig08"), figures_of(record(folder, "fig08"))
    by_key = {(row["method"], row["seed"], row["round"]): row for row in rows}
    for column, counted in (
        ("accumulated_devices_s", "on devices"),
        ("accumulated_total_s", "with uploads"),
    ):
        totals = {key: float(row[column]) for key, row in by_key.items()}
        pairs = [(totals["exact", n, "2"], totals["titanic", n, "2"]) for n in "01"]
        ours = found[f"reduction against TITANIC, {counted}"]["mean"]
        assert ours == pytest.approx(np.mean([100 * (1 - own / other) for own, other in pairs]))
    uploads = {key: float(row["upload_s"]) for key, row in by_key.items()}
    seconds = {key: float(row["devices_s"]) for key, row in by_key.items()}
    for method, *at in by_key:
        if method == "exact":  # VanillaFL uploads only adapters, CollaPipe at least these
            assert uploads["exact", *at] >= uploads["vanilla_fl", *at] * (1 - 1e-9)
        # No method that keeps the optimum's limits is faster on its devices.
        if method in ("titanic", "gpipe", "pipedream", "pipeedge"):
            assert seconds[method, *at] >= seconds["exact", *at] * (1 - 1e-9)
            both = seconds["exact", *at] + uploads["exact", *at]
            assert seconds[method, *at] + uploads[method, *at] >= both * (1 - 1e-9)


def test_methods_that_exceed_limits_are_reported(written: Written) -> None:
    found = figures_of(record(written("fig08")[0], "fig08"))
    # A device of Table II holds 6 of BERT's 12 blocks.
    assert found["VanillaFL: clusters whose memory or energy it exceeds"]["mean"] == 100
    assert found["PipeEdge: clusters whose memory or energy it exceeds"]["mean"] == 0


def test_the_palette_is_legible_and_distinguishable_in_grey() -> None:
    linear = [
        np.power((np.array(to_rgb(mark.colour)) + 0.055) / 1.055, 2.4) @ [0.2126, 0.7152, 0.0722]
        for mark in MARKS
    ]
    assert all(1.05 / (luminance + 0.05) >= 3 for luminance in linear)  # against white
    lightness = sorted(116 * np.cbrt(luminance) - 16 for luminance in linear)
    assert min(np.diff(lightness)) >= 6


def test_negating_an_interval_negates_and_swaps_its_ends() -> None:
    assert -Interval(2, 1, 4) == Interval(-2, -4, -1)
    assert -Interval(2, None, None) == Interval(-2, None, None)


def test_results_from_several_processes_keep_the_order_of_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figure, "PROCESSES", 2)
    assert figure.compute_seeds(abs, [-3, 1, -2]) == [3, 1, 2]
