"""Sweeps: the values and folders that they refuse, and the table of their jobs."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from federated import TINY
from made_run import make_run, write_summary

from collapipe.cli import run
from collapipe.errors import ConfigError

Command = Callable[..., tuple[int, str, str]]
SHORT = *TINY, "framework.train=false", "federation.rounds=1"
_UNLISTED = "has no list of values; -m takes KEY=V1,V2 or KEY=range(…)"


@pytest.mark.parametrize("sweep", [(), ("-m",)])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("strategy=glob(*)", _UNLISTED),
        ("seed=interval(0,1)", _UNLISTED),
        ("seed=range(0,3,step=0)", _UNLISTED),
        ("seed=range(0,0)", "has no values; correct the ends of the range"),
    ],
)
def test_values_that_cannot_be_listed_are_refused(
    command: Command, sweep: tuple[str, ...], option: str, message: str
) -> None:
    """The error message does not suggest ``-m``, which refuses them as well."""
    assert command("run", *sweep, option) == (2, "", f"error: {option}: {message}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-m", "hydra.run.dir=a"], "hydra.run.dir=a: has no effect with -m; set hydra.sweep.dir"),
        (["-m", "++hydra.run.dir=a"], "++hydra.run.dir=a: has no effect with -m; set"),
        (["-m", "hydra.sweep.dir=a,b"], "hydra.sweep.dir=a,b: a sweep has one folder; set one"),
        (["hydra.sweep.dir=a"], "hydra.sweep.dir: has no effect without -m; set hydra.run.dir"),
    ],
)
def test_a_folder_without_effect_is_refused(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = command("run", *options, *SHORT)
    assert (status, err.count("\n")) == (2, 1) and f"error: {message}" in err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "both"),
    [
        (["seed=1,2,1"], "jobs 0 and 2 are the same run, seed=1;"),
        (["optimizer.lr=1e-3,0.001"], "jobs 0 and 1 are the same run, optimizer.lr=0.001;"),
        (["seed=1,2", "task=dates,dates"], "jobs 0 and 1 are the same run, seed=1 task=dates;"),
    ],
)
def test_equal_jobs_are_refused_before_the_first(
    command: Command, tmp_path: Path, values: list[str], both: str
) -> None:
    """A report would refuse to compare them."""
    status, _, err = command("run", "-m", *SHORT, *values, f"hydra.sweep.dir={tmp_path / 's'}")
    assert (status, err.count("\n")) == (2, 1) and f"error: {both} " in err
    assert not (tmp_path / "s").exists()


def test_a_jobs_row_has_no_figures_of_another_run_in_its_folder(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sweep has begun there since the check of the folder."""

    def refused(overrides: Sequence[str]) -> None:
        if (tmp_path / "0").exists():
            raise KeyboardInterrupt
        for job in "02":
            made = make_run(tmp_path / job)
            write_summary(made, status="completed", train_loss=None, clock_s=0.9)
        raise ConfigError("a run is writing here")

    monkeypatch.setattr(run, "run_job", refused)
    _, out, _ = command("run", "-m", "seed=0,1,2", f"hydra.sweep.dir={tmp_path}")
    rows = [line.split()[2:] for line in out.splitlines() if line[:1].isdigit()]
    assert rows == [["failed"], ["not", "begun"], ["not", "begun"]]
    assert "report:" not in out


def test_a_sweep_is_refused_while_another_one_writes_to_its_folder(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, sweep = list[str](), ("run", "-m", *TINY, f"hydra.sweep.dir={tmp_path / 'both'}")

    def run_job(overrides: Sequence[str]) -> None:
        began.append(overrides[-1])
        if len(began) == 1:
            status, _, err = command(*sweep, "seed=2,3")
            assert (status, err.count("\n")) == (2, 1) and "a run is writing here" in err

    monkeypatch.setattr(run, "run_job", run_job)
    assert command(*sweep, "seed=0,1")[0] == 0
    assert len(began) == 2
    assert command(*sweep, "seed=2,3")[0] == 0  # the lock is free
