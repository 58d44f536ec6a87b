"""At what power a run's units sent, and what error that left on the way (Lemma 2)."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from collapipe.errors import ConfigError
from collapipe.runs.reading import Run
from optim.planner import RoundRequest
from server_app.rounds.channel_noise import noise_variance

_REQUESTS = "requests.jsonl.gz"  # of a run's folder
_REQUEST = TypeAdapter(RoundRequest)


@dataclass(frozen=True, slots=True)
class Sent:
    """Means over a run's rounds and units.

    Attributes
    ----------
    power_w
        p of the plans.
    error
        ε(p) of eq. (25), with the gains and interference that the plans were made from.
    """

    power_w: float
    error: float


def sent(run: Run) -> Sent:
    """Of a run whose strategy plans channels.

    Raises ``ConfigError`` where a plan has no uplink, or its round's request is not there.
    """
    requests = {each.round: each for each in _requests(run.folder / _REQUESTS)}
    constant_w = float(run.tree["channel"]["interference_constant_w"])
    powers, errors = list[float](), list[float]()
    for line in run.rounds:
        for plan in line.plan.clusters:
            if plan.uplink is None or line.round not in requests:
                raise ConfigError(
                    f"{run.folder}: round {line.round}: nothing says what unit {plan.unit} sent "
                    "with; remove the folder, so that it is run again"
                )
            powers.append(plan.uplink.power_w)
            errors.append(noise_variance(plan, requests[line.round], constant_w, 1.0))
    return Sent(float(np.mean(powers)), float(np.mean(errors)))


def _requests(file: Path) -> Iterator[RoundRequest]:
    """What each round was planned from."""
    try:
        with gzip.open(file) as lines:
            for text in lines:
                yield _REQUEST.validate_json(text)
    except (OSError, EOFError, zlib.error, ValidationError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"{file}: not what a run writes ({why})") from error
