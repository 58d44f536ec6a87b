"""What a unit may say of its round: nonsense costs it the round, and nobody else."""

from collapipe.config import Settings
from collapipe.errors import WireError
from collapipe.report import ClusterReport

_MOST_PHASES, _LONGEST = 32, 64  # characters of a phase's name
_MOST = 1e100  # of what is averaged, so that no sum of it is infinite


def check_report(report: ClusterReport, unit: int, seen: int, settings: Settings) -> None:
    """Raise ``WireError`` unless the report is the unit's own and a round of it can have been so.

    ``seen`` are the target tokens that its head was trained on; 0 unless that saw all steps.
    """
    steps = settings.federation.local_steps
    sound = report.unit == unit and len(report.losses) == steps and seen == report.target_tokens
    if not sound:
        raise WireError(
            f"unit {unit} reports unit {report.unit}, {len(report.losses)} steps and "
            f"{report.target_tokens} target tokens; its round had {seen or 'not ended'}"
        )
    if not _possible(report, steps * settings.batch_size, settings.task.max_length):
        raise WireError(
            f"unit {unit} reports losses, samples, target tokens, phases, seconds or bytes that "
            "no round of it can have"
        )


def _possible(report: ClusterReport, most_samples: int, max_length: int) -> bool:
    return (
        0 < report.samples <= most_samples
        and 0 < report.target_tokens <= most_samples * max_length
        and all(abs(loss) < _MOST for loss in report.losses)
        and len(report.squared_norms) == len(report.losses)
        and all(0 <= norm < _MOST for norm in report.squared_norms)
        and len(report.seconds) <= _MOST_PHASES
        and all(len(phase) <= _LONGEST and phase.isprintable() for phase in report.seconds)
        and all(0 <= seconds < _MOST for seconds in report.seconds.values())
        and all(0 <= sent < 2**62 for sent in (report.link_bytes_up, report.link_bytes_down))
    )
