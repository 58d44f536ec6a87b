"""What a unit may send after its round: nonsense costs it the round, and nobody else."""

from flwr.app import Message

from collapipe.config import Settings
from collapipe.errors import WireError, one_line
from collapipe.report import ClusterReport
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.compression import restore
from collapipe.wire.messages import Failure, TrainReply

_MOST_PHASES, _LONGEST = 32, 64  # characters of a phase's name
_MOST = 1e100  # of what is averaged, so that no sum of it is infinite


def checked_reply(
    message: Message, unit: int, sent: Tensors, seen: int | None, settings: Settings
) -> TrainReply | Failure:
    """A unit's reply with its weights whole, or why it cannot be used.

    Parameters
    ----------
    sent
        The weights that the unit got.
    seen
        Target tokens that its head on the server was trained on, 0 unless that saw all steps; None:
        it has none there.
    """
    if message.has_error():
        return Failure("ClientApp", one_line(message.error.reason))
    try:
        reply = records.unpack_reply(message.content)
        if isinstance(reply, Failure):
            return Failure(one_line(reply.kind), one_line(reply.message))
        check_report(reply.report, unit, seen, settings)
        weights = restore(reply.weights, sent, settings.compression.upload, f"unit {unit}")
    except WireError as error:
        return Failure("WireError", one_line(error))
    return TrainReply(weights, reply.report, reply.state)


def check_report(report: ClusterReport, unit: int, seen: int | None, settings: Settings) -> None:
    """Raise ``WireError`` unless the report is the unit's own and a round of it can have been so.
    ``seen`` as in ``checked_reply``."""
    steps = settings.federation.local_steps
    counted = seen is None or seen == report.target_tokens
    if report.unit != unit or len(report.losses) != steps or not counted:
        raise WireError(
            f"unit {unit} reported unit {report.unit}, {len(report.losses)} steps and "
            f"{report.target_tokens} target tokens, expected {steps} steps"
            + (f" and {seen} target tokens" if seen is not None else "")
        )
    most_samples = steps * settings.batch_size
    possible = (
        0 < report.samples <= most_samples
        and 0 < report.target_tokens <= most_samples * settings.task.max_length
        and all(abs(loss) < _MOST for loss in report.losses)
        and len(report.squared_norms) == len(report.losses)
        and all(0 <= norm < _MOST for norm in report.squared_norms)
        and len(report.seconds) <= _MOST_PHASES
        and all(len(phase) <= _LONGEST and phase.isprintable() for phase in report.seconds)
        and all(0 <= seconds < _MOST for seconds in report.seconds.values())
        and all(0 <= sent < 2**62 for sent in (report.link_bytes_up, report.link_bytes_down))
    )
    if not possible:
        raise WireError(
            f"unit {unit} reported losses, samples, target tokens, phases, seconds or bytes that "
            "no round of it can have"
        )
