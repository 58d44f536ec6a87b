"""A run's totals, its summary on disk, and the table at its end."""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from collapipe.config import Settings
from collapipe.errors import Called, CollaPipeError, ConfigError, StorageError
from collapipe.formatting import counted, print_line
from collapipe.plan import ClusterPlan
from collapipe.privacy.accounting import affordable_rounds
from collapipe.report import RoundReport, UnitsEvaluation
from collapipe.runs.confirmation import resume_command
from collapipe.runs.folder import RunFolder
from collapipe.runs.reading import how_to_go_on
from collapipe.sections import PrivacySettings
from collapipe.secure_aggregation.session import noise_parts
from collapipe.state import Estimates
from collapipe.tasks.evaluation import Evaluation
from optim.dssra import Dssra
from server_app.records.progress import end_table, evaluation_lines

_log = logging.getLogger(__name__)
_SHOWN_UNITS = 12  # in the table at the end


@dataclass
class History:
    """Figures of all rounds so far, from which the summary is made."""

    start: float
    num_rounds: int = 0
    losses: list[float] = field(default_factory=list)
    clock_s: float = 0.0
    epsilon: float | None = None  # ε of all rounds, at privacy.delta
    ended: str | None = None  # why a completed run has fewer rounds than federation.rounds
    uploads_counted: bool = True  # whether every round's modelled time includes uploads
    energy_j: float = 0.0
    estimates: Estimates = field(default_factory=Estimates)
    samples: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    test: Evaluation | None = None
    test_on_units: UnitsEvaluation | None = None
    rounds: Counter[int] = field(default_factory=Counter)  # finished rounds of each unit
    plans: dict[int, ClusterPlan] = field(default_factory=dict)  # each unit's last plan
    input_tokens: int = 0
    rounds_s: float = 0.0  # measured seconds of all rounds
    skipped: int = 0  # number of skipped rounds

    def add(self, report: RoundReport) -> None:
        self.num_rounds += 1
        self.skipped += report.skipped is not None
        self.clock_s, self.estimates = report.clock_s, report.estimates
        self.uploads_counted &= all(cost.upload_s is not None for cost in report.costs.values())
        self.energy_j += report.energy_j
        if report.train_loss is not None:
            self.losses.append(report.train_loss)
        self.epsilon = report.epsilon
        self.samples += report.samples
        self.input_tokens += report.input_tokens
        self.bytes_up += report.bytes_up
        self.bytes_down += report.bytes_down
        self.rounds.update(report.units)
        self.plans.update({cluster.unit: cluster for cluster in report.plan.clusters})

    @property
    def tokens_per_s(self) -> float:
        """Input tokens per second of the rounds, without padding; 0 before the first round."""
        return self.input_tokens / self.rounds_s if self.rounds_s else 0.0


@contextmanager
def summarised(
    folder: RunFolder, settings: Settings, history: History, console: Console, called: Called
) -> Iterator[None]:
    """Write the summary when the run ends, also if it ends with an error."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        summary = _summary(history, settings, error)
        try:
            folder.write_summary(summary)
        except StorageError as unwritten:
            if error is None:
                raise
            if not isinstance(error, StorageError):  # a StorageError has reported the same cause
                _log.warning("%s", unwritten)
        if history.num_rounds:
            ended, wall_s = f"{summary['status']} after", summary["wall_s"]
            rows = _end_rows(history, settings, ended, wall_s, called)
            console.print(end_table([*rows, ("folder", str(folder.path))]), soft_wrap=True)
            if error is not None:
                print_line(console, how_to_go_on(folder.path, resume_command(settings)))


def _summary(history: History, settings: Settings, error: BaseException | None) -> dict[str, Any]:
    """Return the summary of a run that ended with ``error``, or without one."""
    test, losses, strategy = history.test, history.losses, settings.tree["strategy"]
    names = ("kappa", "gradient_bound", "interference_constant_w", "gamma_max")  # of eq. (28)
    status, cause, exit_status = _outcome(error)
    return {
        "status": status,
        "error": cause,
        "exit_status": exit_status,
        "task": settings.task.name,
        "framework": settings.framework.name,
        "seed": settings.seed,
        "metric": asdict(test.score) if test else None,
        "test_loss": test.loss if test else None,
        "train_loss": {"first": losses[0], "last": losses[-1]} if losses else None,
        "rounds_completed": history.num_rounds,
        "rounds_skipped": history.skipped,
        "samples": history.samples,
        "input_tokens": history.input_tokens,
        "tokens_per_s": history.tokens_per_s,
        **_private(history, settings),
        "wall_s": time.perf_counter() - history.start,
        "clock": settings.federation.clock,
        "clock_s": history.clock_s,
        "modelled_energy_j": history.energy_j,
        "bytes_up": history.bytes_up,
        "bytes_down": history.bytes_down,
        **({"on_units": asdict(history.test_on_units)} if history.test_on_units else {}),
        "constants": {
            "source": strategy.get("constants"),
            "set": {name: strategy[name] for name in names if name in strategy},
            "estimated": asdict(history.estimates),
        },
    }


def _outcome(error: BaseException | None) -> tuple[str, str | None, int]:
    """Status, cause and exit status of a run that ended with ``error``."""
    if error is None:
        return "completed", None, 0
    if isinstance(error, KeyboardInterrupt | SystemExit):  # Flower stops runs with SystemExit
        return "interrupted", "interrupted", 130
    if isinstance(error, CollaPipeError):
        return "failed", str(error), error.exit_status
    return "failed", f"{type(error).__name__}: {error}", 1


def _end_rows(
    history: History, settings: Settings, ended: str, wall_s: float, called: Called
) -> list[tuple[str, str]]:
    """Return names and values as a list, because a unit may have another row's name."""
    num_units = settings.federation.num_units
    rows = {"run": f"{ended} {counted(history.num_rounds, 'round')}, {wall_s:.1f} s"}
    if history.losses:
        rows["train loss"] = f"{history.losses[0]:.4f} → {history.losses[-1]:.4f}"
    if "causal" in settings.task.heads and history.input_tokens:
        rows["speed"] = f"{history.tokens_per_s:,.0f} tokens/s in rounds"
    if history.skipped:
        were = "was" if history.skipped == 1 else "were"
        rows["skipped"] = f"{history.skipped} of these rounds {were} skipped"
    if history.ended is not None:
        rows["ended early"] = history.ended
    if history.epsilon is not None:
        rows["privacy"] = privacy_text(history.epsilon, settings.privacy)
    rows["clock"] = clock_text(history, settings.federation.clock)
    if history.test:
        score = history.test.score
        rows[f"test {score.name}"] = f"{score.value:.4g}  ({score.signature})"
        rows |= {f"test {name}": f"{value:.4g}" for name, value in score.extra_metrics.items()}
    if history.test_on_units:
        rows["test on units"] = "; ".join(evaluation_lines(history.test_on_units, called))
    units = []
    for unit in range(min(num_units, _SHOWN_UNITS)):
        plan = f", last plan {_partition(history.plans[unit])}" if unit in history.plans else ""
        units.append((called(unit), counted(history.rounds[unit], "round") + plan))
    if num_units > _SHOWN_UNITS:
        units.append(("…", f"{num_units - _SHOWN_UNITS} more units, see metrics.jsonl"))
    return [*rows.items(), *units, *sent(history).items()]


def _private(history: History, settings: Settings) -> dict[str, object]:
    """Return the summary's entry on privacy; empty without noise."""
    if history.epsilon is None:
        return {}
    seed = settings.privacy.noise_seed
    secret = "the operating system's" if settings.privacy.noise_by == "server" else "the units' own"
    source = secret if seed is None else f"privacy.noise_seed={seed}"
    entry = {"epsilon": history.epsilon, "delta": settings.privacy.delta, "noise": source}
    return {"privacy": entry | ({"ended": history.ended} if history.ended else {})}


def privacy_text(epsilon: float, settings: PrivacySettings) -> str:
    """Describe the guarantee, such as ``ε = 7.9, δ = 1e-05 of each unit``, with a warning if the
    noise can be reproduced."""
    seed = settings.noise_seed
    known = "" if seed is None else f"; NOT private if privacy.noise_seed={seed} is known"
    return f"ε = {epsilon:.3g}, δ = {settings.delta:g} of each unit{known}"


def budget_text(settings: PrivacySettings) -> str | None:
    """Describe how many rounds ``privacy.max_epsilon`` allows; None if it is not set.

    Raises ``ConfigError`` if it allows no round.
    """
    if (limit := settings.max_epsilon) is None:
        return None
    rounds = affordable_rounds(settings, limit)
    if not rounds:
        raise ConfigError(
            f"privacy.max_epsilon={limit:g}: one round exceeds it with privacy.noise_multiplier="
            f"{settings.noise_multiplier:g}; raise one of them"
        )
    guarantee = f"ε ≤ {limit:g}, δ = {settings.delta:g} of each unit"
    return f"privacy: {guarantee}: no unit takes part in more than {counted(rounds, 'round')}"


def noise_warning(settings: Settings, weights: int) -> str | None:
    """Compare the norm of the noise in a round's mean with the largest norm of an update.

    ``weights`` is the number of trainable weights. Returns None if the noise is not larger.
    """
    units = _units_a_round(settings)
    times = settings.privacy.noise_multiplier * math.sqrt(weights) / units
    if settings.privacy.noise_by == "units":
        times *= math.sqrt(units / noise_parts(units, settings.privacy.threshold))
    if times <= 1:
        return None
    return (
        f"privacy: the noise in the mean of {counted(units, 'unit')} is {times:,.0f} times the "
        "largest update; use more units, or fewer trainable weights (adapter=lora)"
    )


def clock_text(history: History, clock: str) -> str:
    """Describe the run's clock, such as ``144.7 s, modelled, uploads not counted``. Uploads are not
    counted if the strategy plans no channels."""
    if clock == "real":
        return f"{history.clock_s:,.1f} s, measured"
    missing = "" if history.uploads_counted else ", uploads not counted"
    return f"{history.clock_s:,.1f} s, modelled{missing}"


def sent(history: History) -> dict[str, str]:
    """Return the table's row of bytes; empty if nothing was sent."""
    if not history.bytes_up and not history.bytes_down:
        return {}
    up, down = (f"{size / 1e6:,.1f} MB" for size in (history.bytes_up, history.bytes_down))
    return {"bytes": f"{up} up, {down} down"}


def _partition(plan: ClusterPlan) -> str:
    """Describe a plan, such as ``2 phone-1 + 4 laptop-2; m=4``, with a chosen place of the head."""
    if not plan.segments:
        return "the whole model on each device"
    held = " + ".join(f"{segment.span.blocks} {segment.holders}" for segment in plan.segments)
    place = plan.uplink.head if plan.uplink else None
    head = f"; head on the {place.replace('_', ' ')}" if place else ""
    names = ", ".join(name for segment in plan.segments for name in segment.recomputing)
    again = f"; recomputing: {names}" if names else ""
    return f"{held}; m={plan.num_micro_batches}{head}{again}"


def opening(settings: Settings, folder: RunFolder) -> str:
    """Return the run's first line, such as ``collapipe: task dates, 3 units of 3 devices, …``."""
    federation, devices = settings.federation, settings.build("cluster").num_devices
    units, most = federation.num_units, _units_a_round(settings)
    chosen = f"{most} of {units} units a round, " if most < units else ""
    made_up = " on made-up rows" if settings.data.synthetic else ""
    return (
        f"{settings.framework.name}: task {settings.task.name}{made_up}, {counted(units, 'unit')} "
        f"of {counted(devices, 'device')}, {chosen}{counted(federation.rounds, 'round')} of "
        f"{counted(federation.local_steps, 'local step')}, seed {settings.seed}; "
        f"folder {folder.path}"
    )


def _units_a_round(settings: Settings) -> int:
    """Return the largest number of units that take part in a round."""
    units, strategy = settings.federation.num_units, settings.planner
    most = getattr(strategy, "num_scheduled", units)
    if isinstance(strategy, Dssra):
        most = settings.channel.num_channels
    return min(most, units)
