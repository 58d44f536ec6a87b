"""Remark 2: its runs, the values that are read from them, and its claims."""

import csv
import gzip
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from federated import play
from round_report import round_report

from collapipe import config
from collapipe.errors import ConfigError
from collapipe.report import RoundReport, Score
from collapipe.runs.reading import Run, Summary, read_run
from reproduction import remark2
from reproduction.paper_world import paper_presets
from reproduction.remark2 import FACTORS, POWERS_W, QUIET, SETTINGS, transmission
from reproduction.training import Job, Training

ROUNDS = 5
QUIET_LOSS = 0.5
Loss = Callable[[float, float], float]
"""(noise factor, power) → the loss that this noise adds."""


def error(power_w: float) -> float:
    """ε(p) with h = 1 and I = 0.08."""
    return 0.08 / (power_w + 0.08)


def as_error(factor: float, power_w: float) -> float:
    """The added loss of Theorem 1, in proportion to ε."""
    return 100 * factor * error(power_w)


@dataclass(frozen=True)
class Made(Training):
    """Returns made-up runs at once; each seed adds 0.1 to the loss."""

    added: Loss = as_error

    def runs(self, jobs: Sequence[Job]) -> Mapping[Job, Run]:
        return {job: self._made(job) for job in jobs}

    def _made(self, job: Job) -> Run:
        factor, power_w = factor_and_power(job)
        loss = QUIET_LOSS + job.seed / 10 + self.added(factor, power_w)
        lines = tuple(
            round_report(t, units=(0,), train_loss=loss / t, clock_s=float(t))
            for t in range(1, ROUNDS + 1)
        )
        tree = {
            "federation": {"num_units": 1, "rounds": ROUNDS, "clock": "modelled"},
            "power_w": power_w,
        }
        summary = Summary("completed", metric=Score("BLEU", 10.0), test_loss=loss, wall_s=2.0)
        return Run(Path("made-up"), "1", "", tree, lines, summary, {}, {})


def factor_and_power(job: Job) -> tuple[float, float]:
    """The noise factor and the power of a job."""
    options = dict(override.split("=") for override in job.overrides)
    assert set(options) == {"federation.channel_noise", "channel.max_power_w"}
    return float(options["federation.channel_noise"]), float(options["channel.max_power_w"])


@pytest.fixture
def power_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up runs transmit with the power in their options."""
    monkeypatch.setattr(
        remark2, "transmission", lambda run: (run.tree["power_w"], error(run.tree["power_w"]))
    )


def agreed(added: Loss) -> dict[str, bool]:
    """Whether each claim agrees, by the claim's text."""
    training = Made(None, Path(), False, added=added)
    return {each.text: each.agrees for each in remark2.FIGURE.evidence((0, 1, 2), training).claims}


@pytest.mark.usefixtures("power_of_options")
def test_a_loss_in_proportion_to_the_error_has_diminishing_returns() -> None:
    found = agreed(as_error)
    assert len(found) == 2 + 3 * len(FACTORS)
    assert all(found.values())


@pytest.mark.usefixtures("power_of_options")
@pytest.mark.parametrize(
    ("added", "falls", "per_watt", "per_doubling"),
    [
        (lambda factor, p: 0.0, False, False, False),
        (lambda factor, p: p * bool(factor), False, False, True),
        (lambda factor, p: (1 - p) * bool(factor), True, False, False),
        (lambda factor, p: -np.log2(p) * bool(factor), True, True, False),
        (lambda factor, p: 1 / p * bool(factor), True, True, True),
    ],
    ids=["no effect", "rises", "linear", "logarithmic", "inverse"],
)
def test_a_falling_loss_and_diminishing_returns_are_distinguished(
    added: Loss, falls: bool, per_watt: bool, per_doubling: bool
) -> None:
    found = agreed(added)
    # A rising loss has negative returns, and the last doubling's is the lowest.
    for factor in FACTORS:
        its = [agrees for text, agrees in found.items() if text.startswith(f"factor {factor:g}:")]
        assert its == [falls, per_watt, per_doubling]


@pytest.mark.usefixtures("power_of_options")
def test_findings_are_computed_from_the_runs() -> None:
    evidence = remark2.FIGURE.evidence((0, 1), Made(None, Path(), False))
    found = {each.text: each.ours.mean for each in evidence.findings}
    assert found["no noise: test loss"] == pytest.approx(QUIET_LOSS + 0.05)
    assert found["ε with 0.25 W"] == pytest.approx(error(0.25))
    excess = found["factor 0.1, 0.125 W: test loss above that without noise"]
    assert excess == pytest.approx(10 * error(0.125))
    assert evidence.settings["runs"] == 2 * len(SETTINGS)


def test_runs_differ_only_in_noise_and_power() -> None:
    jobs = list[Job]()

    class Recorded(Made):
        def runs(self, requested: Sequence[Job]) -> Mapping[Job, Run]:
            jobs.extend(requested)
            raise ConfigError("that is all")

    with pytest.raises(ConfigError):
        remark2.FIGURE.evidence((0, 1), Recorded(None, Path(), False))
    assert len({(job.variant, job.seed) for job in jobs}) == len(jobs) == 2 * len(SETTINGS)
    settings = [factor_and_power(job) for job in jobs if job.seed == 1]
    assert settings == [(each.factor, each.power_w) for each in SETTINGS]
    assert sum(factor == 0 for factor, _ in settings) == 1


def test_the_highest_power_is_the_one_in_table_ii() -> None:
    assert QUIET.power_w == POWERS_W[-1] == paper_presets().channel.max_power_w
    assert np.allclose(np.divide(POWERS_W[1:], POWERS_W[:-1]), 2)


@pytest.mark.parametrize("sizes", ["", ",full_transformer"], ids=["reduced", "the paper's"])
def test_the_experiment_has_all_units_channel_noise_and_no_dropout(sizes: str) -> None:
    settings = config.load_overrides([f"experiment=[remark2{sizes}]"])
    assert settings.tree["strategy"]["_target_"] == "optim.baselines.AllUnits"
    assert settings.tree["channel"]["interference_constant_w"] == 0.08
    assert settings.tree["channel"]["num_channels"] >= settings.federation.num_units
    assert settings.federation.channel_noise > 0
    assert settings.tree["model"]["dropout"] == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run over uplinks that are all alike."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    world = ("cluster=paper", "channel=paper", "strategy=all", "channel.max_power_w=0.2")
    world += ("strategy.energy=adapters",)
    equal_uplinks = ("channel.gain_db=[-3,-3]", "channel.interference_w=[0.06,0.06]")
    play(folder, *world, *equal_uplinks, "federation.channel_noise=1.0e-3")
    return folder


def test_power_and_error_are_read_from_the_run(trained: Path) -> None:
    power_w, error = transmission(read_run(trained))
    assert power_w == pytest.approx(0.2)
    assert error == pytest.approx(0.08 / (0.2 * 10**-0.3 + 0.06))


@pytest.mark.parametrize("lack", ["file", "round", "uplink", "end", "sense"])
def test_a_run_with_missing_or_damaged_uplink_records_is_named(
    lack: str, trained: Path, tmp_path: Path
) -> None:
    run = read_run(shutil.copytree(trained, tmp_path / "run"))
    requests = run.folder / "requests.jsonl.gz"
    if lack == "file":
        requests.unlink()
    if lack == "round":
        requests.write_bytes(gzip.compress(gzip.decompress(requests.read_bytes()).split(b"\n")[0]))
    if lack == "end":
        requests.write_bytes(requests.read_bytes()[:-40])
    if lack == "sense":
        whole = requests.read_bytes()
        requests.write_bytes(whole[: len(whole) // 2] + b"?" * (len(whole) // 2))
    if lack == "uplink":
        run = replace(run, rounds=(*run.rounds[:-1], _silent(run.rounds[-1])))
    with pytest.raises(ConfigError, match=f"^{run.folder}") as raised:
        transmission(run)
    assert "\n" not in str(raised.value)


def _silent(line: RoundReport) -> RoundReport:
    """The round with a plan without uplinks."""
    clusters = tuple(replace(each, uplink=None) for each in line.plan.clusters)
    return replace(line, plan=replace(line.plan, clusters=clusters))


@pytest.mark.usefixtures("power_of_options")
def test_the_figure_is_written_without_data(
    reproduce: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLLAPIPE_DATA", raising=False)
    monkeypatch.setattr("reproduction.command.Training", Made)
    status, out, err = reproduce("remark2", "--seeds", 2, "--output", tmp_path)
    assert (status, err) == (0, "")
    assert "remark2" in out
    found = json.loads((tmp_path / "remark2.json").read_text())
    assert found["basis"].startswith("learning is real")
    assert found["provenance"]["settings"] == {
        "sizes": "reduced",
        "runs": 2 * len(SETTINGS),
        "runs_wall_s": 2 * 2 * len(SETTINGS),
    }
    with (tmp_path / "remark2.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert len(table) == ROUNDS * 2 * len(SETTINGS)
    assert {float(row["power_w"]) for row in table} == set(POWERS_W)
    text = "".join(ElementTree.parse(tmp_path / "remark2.svg").getroot().itertext())
    assert "transmit power p [W]" in text
    assert "no noise" in text
