"""What happened: what a unit tells after a round, and what the server writes down of it."""

from dataclasses import dataclass, field

from collapipe.plan import RoundPlan


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """One unit's round.

    Attributes
    ----------
    losses
        Loss of each local step: sum over target tokens divided by the tokens of the whole batch.
    samples, target_tokens
        Trained on in this round, all local steps together.
    seconds
        Wall time per phase of the control unit's thread, in seconds.
    link_bytes_up, link_bytes_down
        Payload of the decoder link: activations with masks and targets up, gradients down.
    """

    unit: int
    losses: tuple[float, ...]
    samples: int
    target_tokens: int
    seconds: dict[str, float] = field(default_factory=dict)
    link_bytes_up: int = 0
    link_bytes_down: int = 0


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One round as the server saw it; a line of ``metrics.jsonl``.

    Attributes
    ----------
    plan
        What was decided: who, which blocks, channels and powers; Γ and the queues.
    queues
        Y_n(t+1) of all N units, which waited on if they failed; empty without a scheduler's.
    train_loss
        Mean over the units' steps, weighted as the aggregation weighs the units.
    failures
        Cause of each unit that was scheduled and did not finish.
    bytes_up, bytes_down
        Activations of all local steps plus the upload; gradients plus the download.
    """

    round: int
    plan: RoundPlan
    queues: tuple[float, ...]
    units: tuple[int, ...]
    failures: dict[int, str]
    train_loss: float
    samples: int
    target_tokens: int
    bytes_up: int
    bytes_down: int
    seconds: dict[str, float]
