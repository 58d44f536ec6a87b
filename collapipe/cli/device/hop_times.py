"""Time messages over the hops of a cluster's pipeline.

A hop's round trip is the time between two actions of both its ends, forward and back, in which the
offset of their clocks cancels.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import median

import torch

from collapipe.cli.device.trial_round import Ends, opened
from collapipe.devices.fitting import Fit, fit
from collapipe.errors import CancelledRoundError, LinkError
from collapipe.models.dropout import DropoutKey
from collapipe.models.transformer import TransformerSpec
from collapipe.process import cancellation
from collapipe.process.cancellation import cancellable
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.streams.channels import Dialer
from pipeline.devices.control_unit.segments import RemoteSegments

# Hops are timed with blocks that compute little for the bytes of their activations.
_DIM, _TOKENS = 32, 32
_ROW_BYTES = _DIM * torch.float32.itemsize
_MOST_BYTES = 8 * 2**20  # of a message
_MOST_S = 3.0  # for all messages of a size, after the first ones
_FEWEST = 2  # messages of a size; the first one is not counted
_HOP_S = 10.0  # time limit of all messages, for each hop
_HEAD_START_S = 0.05  # so that each device has begun the step when the first message arrives


@dataclass(frozen=True, slots=True)
class Trip:
    """The median round-trip time of a message over a hop, or over all hops of a pipeline."""

    num_bytes: int  # each way
    seconds: float


def hop_trips(
    devices: Sequence[DeviceAddress], dialer: Dialer, sizes: Sequence[int], repeats: int
) -> list[list[Trip]]:
    """Time messages of about these sizes over each hop of a pipeline: from the control unit to the
    first device, on to each next one, and from the last one to the control unit.

    ``sizes`` ascend. A hop's trips lack sizes that do not fit into the time limit. Raises
    ``LostDeviceError``, ``BusyDeviceError``, ``UnreachedError`` if a device cannot dial the next
    one, and ``LinkError`` if not even the first size fits.
    """
    spec = TransformerSpec(len(devices), 1, _DIM, 1, 1, 0.0)
    limit_s = _HOP_S * (len(devices) + 1)
    until_s = time.monotonic() + limit_s
    found: list[list[Trip]] = [[] for _ in range(len(devices) + 1)]
    try:
        with (
            cancellable(limit_s),
            opened(devices, dialer, spec, blocks=1, num_micro_batches=1) as segments,
        ):
            if segments.unreached is not None:
                raise segments.unreached
            for of_hops in _trips(segments, sizes, repeats, until_s):
                for trips, each in zip(found, of_hops, strict=True):
                    trips.append(each)
    except CancelledRoundError as error:
        cancellation.check()  # the caller's cancellation is no fault of the hops
        if not found[0]:
            raise LinkError(f"{_FEWEST} messages exceed {limit_s:g} s; use faster links") from error
    return found


def expected_s(passes: Sequence[Trip], num_bytes: int) -> float:
    """Estimate the seconds of a message over all hops from those of smaller ones.

    One smaller size says nothing of the hops' rate, so the estimate is then the least possible.
    """
    if len(passes) < 2:
        return passes[0].seconds if passes else 0.0
    law = fit_hop(passes)
    return law.each * num_bytes + law.fixed


def fit_hop(trips: Sequence[Trip]) -> Fit:
    """Fit a round trip's seconds per byte, and per message without bytes."""
    return fit([(each.num_bytes, 1.0) for each in trips], [each.seconds for each in trips])


def _trips(
    segments: RemoteSegments, sizes: Sequence[int], repeats: int, until_s: float
) -> Iterator[list[Trip]]:
    """Yield each size's trips over the hops, as long as messages are expected before ``until_s``
    of ``time.monotonic``."""
    passes, steps = list[Trip](), count()
    for hidden in map(_hidden, sizes):
        began = time.monotonic()
        if began + _FEWEST * expected_s(passes, hidden.nbytes) > until_s:
            return
        taken = _repeated(segments, hidden, steps, repeats)
        passes.append(Trip(hidden.nbytes, (time.monotonic() - began) / len(taken)))
        yield [Trip(hidden.nbytes, median(seconds)) for seconds in zip(*taken[1:], strict=True)]


def _repeated(
    segments: RemoteSegments, hidden: torch.Tensor, steps: Iterator[int], repeats: int
) -> list[list[float]]:
    """Return each message's seconds over each hop, of one that is not counted and the repeats."""
    taken, began = list[list[float]](), time.monotonic()
    while len(taken) < _FEWEST or (len(taken) <= repeats and time.monotonic() - began < _MOST_S):
        taken.append(_round_trips(segments, hidden, next(steps)))
    return taken


def _round_trips(segments: RemoteSegments, hidden: torch.Tensor, step: int) -> list[float]:
    """Return the seconds of a message, there and back, over each hop."""
    rows, tokens, _ = hidden.shape
    ends = Ends(hidden, tokens, _HEAD_START_S)
    segments.run(ends.first, ends, DropoutKey(0, 0, step), [(rows, tokens)])
    # of each end of a hop: forward received and sent, backward received and sent
    devices = [
        (forward[1], forward[2], backward[1], backward[2])
        for forward, backward in map(torch.Tensor.tolist, segments.action_times)
    ]
    first, last = ends.first, ends
    control_unit = (last.received_s, first.sent_s, first.received_s, last.sent_s)
    stages = (control_unit, *devices, control_unit)
    return [(after[0] - before[1]) + (before[2] - after[3]) for before, after in pairwise(stages)]


def _hidden(num_bytes: int) -> torch.Tensor:
    """Make an activation [b, s, d] of about so many bytes, at most ``_MOST_BYTES``."""
    rows = max(1, min(num_bytes, _MOST_BYTES) // _ROW_BYTES)
    tokens = min(rows, _TOKENS)
    return torch.randn(rows // tokens, tokens, _DIM)  # random, so that no link compresses it
