"""Training runs of a figure: ``collapipe run`` in subprocesses; finished runs are not repeated."""

import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collapipe import config
from collapipe.cli.app import child_command
from collapipe.config import Settings
from collapipe.config.overrides import setting
from collapipe.config.resolved import flattened
from collapipe.errors import ConfigError, RoundFailedError
from collapipe.runs.reading import Run, read_run

AT_A_TIME = 2
_POLL_S = 0.2
_SETS = "multi30k, chinese_ner and toutiao15"
_VARIABLE = "COLLAPIPE_DATA"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A file of ``conf/experiment``."""

    name: str
    data: str | None  # its folder; None if the task makes synthetic rows
    full: str  # the file with the paper's sizes


@dataclass(frozen=True, slots=True)
class Job:
    """A run of ``experiment`` with ``overrides``, and further ones that ``derive`` computes.

    ``derive`` takes the settings of the experiment, so that it fits any sizes.
    """

    experiment: Experiment
    variant: str
    seed: int
    overrides: tuple[str, ...] = ()
    derive: Callable[[Settings], tuple[str, ...]] | None = None


SINGLE = "strategy.sharing=never"  # the paper's stages have one device


@dataclass(frozen=True)
class Training:
    """The folder of data, the folder of runs, and whether models have the paper's sizes."""

    data: Path | None  # None if no experiment reads data
    folder: Path
    full: bool
    report: Callable[[str], None] = print

    @property
    def sizes(self) -> str:
        return "the paper's" if self.full else "reduced"

    def runs(self, jobs: Sequence[Job]) -> Mapping[Job, Run]:
        """Return every job's finished run; train those that are not finished.

        Raises ``RoundFailedError`` with the last line of a run that fails; finished ones stay.
        """
        sets = {name for job in jobs if (name := job.experiment.data)}
        missing = sorted(name for name in sets if not (self.data and (self.data / name).is_dir()))
        if missing:
            raise ConfigError(f"--data {self.data}: has no folder {', '.join(missing)}")
        begun = time.monotonic()
        waiting = {job: command for job in jobs if (command := self._command(job))}
        self.report(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are there already")
        for number, job in enumerate(_finished(waiting, self._log), 1):
            minutes = (time.monotonic() - begun) / 60
            self.report(f"{self._name(job)}: done, {number} of {len(waiting)}, {minutes:.1f} min")
        return {job: read_run(self.folder / self._name(job)) for job in jobs}

    def _name(self, job: Job) -> str:
        return f"{job.experiment.name}{'_full' * self.full}/{job.variant}-{job.seed}"

    def _log(self, job: Job) -> Path:
        return self.folder / f"{self._name(job)}.log"

    def _command(self, job: Job) -> Sequence[str] | None:
        """Return the command that remains to be run for a job; None if the job is finished."""
        run_dir, overrides = self.folder / self._name(job), self._overrides(job)
        if (run_dir / "config.yaml").is_file():
            found, requested = read_run(run_dir), config.load_overrides(overrides)
            then, now = flattened(found.tree), flattened(requested.tree)
            different = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
            if different:
                raise ConfigError(
                    f"{run_dir}: holds a run with other options ({', '.join(different[:4])}); "
                    "remove it, or set another --output"
                )
            if found.summary is not None and found.summary.status == "completed":
                return None
            if any((run_dir / "checkpoints").glob("*")):
                return child_command("resume", str(run_dir))
        if run_dir.exists():  # cut off before its first checkpoint
            shutil.rmtree(run_dir)
        return child_command("run", *overrides, setting("hydra.run.dir", run_dir))

    def _overrides(self, job: Job) -> list[str]:
        names = [job.experiment.name, *([job.experiment.full] if self.full else [])]
        data = self.data and job.experiment.data and self.data / job.experiment.data
        root = [setting("data.root", data)] if data else []
        given = [f"experiment=[{','.join(names)}]", *root, *job.overrides, f"seed={job.seed}"]
        return [*given, *job.derive(config.load_overrides(given))] if job.derive else given


def data_folder(given: Path | None) -> Path:
    """Return ``given`` or $COLLAPIPE_DATA. Raises ``ConfigError`` if the folder is missing."""
    named = given or (Path(os.environ[_VARIABLE]) if os.environ.get(_VARIABLE) else None)
    if named is None:
        raise ConfigError(
            f"fig06, fig09 and fig10 train: name the folder that has {_SETS} with --data FOLDER or "
            f"{_VARIABLE}; the other figures need none"
        )
    if not named.is_dir():
        option = "--data" if given else _VARIABLE
        raise ConfigError(f"{option}={named}: no such folder; it is to have {_SETS}")
    return named.resolve()


def _finished(commands: Mapping[Job, Sequence[str]], log: Callable[[Job], Path]) -> Iterator[Job]:
    """Run the jobs, ``AT_A_TIME`` at a time; yield them in the order in which they end."""
    waiting, running = deque(commands), dict[Job, subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < AT_A_TIME:
                job = waiting.popleft()
                running[job] = _start(commands[job], log(job))
            time.sleep(_POLL_S)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                if running.pop(job).returncode:
                    lines = log(job).read_text(encoding="utf-8", errors="replace").splitlines()
                    last = next((each for each in reversed(lines) if each.strip()), "no output")
                    raise RoundFailedError(f"{log(job)}: {last.strip().removeprefix('error: ')}")
                yield job
    finally:  # end jobs that still run, as Ctrl-C does
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        # In a new session, so that Ctrl-C reaches it only once, from here.
        return subprocess.Popen(  # noqa: S603 - our own command
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
