"""What units keep between rounds: asked for at a checkpoint, given back when a run goes on."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from collapipe.errors import RoundFailedError, WireError, one_line
from collapipe.sections import FederationSettings
from collapipe.wire import records
from collapipe.wire.messages import Failure
from server_app.checkpoints.checkpoint import Kept
from server_app.discovery import ask

T = TypeVar("T")


def collect_kept(
    grid: Grid, federation: FederationSettings, units: Mapping[int, int]
) -> dict[int, Kept]:
    """Of every unit, its optimiser's memory and the like; ``units`` maps nodes to units.

    Raises ``RoundFailedError`` or ``WireError`` where one does not tell.
    """
    contents = {node: records.pack_groups({}) for node in units}
    replies = ask(grid, federation, contents, records.KEEP)
    kept = {
        units[node]: _answer(units[node], reply, records.unpack_groups)
        for node, reply in sorted(replies.items())
    }
    for unit, named in kept.items():
        _check_can_be_written(unit, named)
    return kept


def give_back(
    grid: Grid,
    federation: FederationSettings,
    units: Mapping[int, int],
    kept: Mapping[int, Kept],
) -> None:
    """Every unit goes on from what it kept then, be it nothing.

    Raises ``RoundFailedError`` where one cannot.
    """
    contents = {node: records.pack_groups(kept.get(unit, {})) for node, unit in units.items()}
    for node, reply in ask(grid, federation, contents, records.RESTORE).items():
        _answer(units[node], reply, records.unpack_groups)


def _check_can_be_written(unit: int, kept: Kept) -> None:
    """What a unit sends must not make a file that cannot be read."""
    for name, tensors in kept.items():
        odd = [of for of, tensor in tensors.items() if tensor.is_complex()]
        if not name.isidentifier() or odd:
            raise WireError(f"unit {unit} keeps {name[:80]!r}, which no checkpoint can hold")


def _answer(unit: int, reply: Message, unpack: Callable[[RecordDict], T | Failure]) -> T:
    if reply.has_error():
        raise RoundFailedError(f"unit {unit}: {one_line(reply.error.reason)}")
    answer = unpack(reply.content)
    if isinstance(answer, Failure):
        raise RoundFailedError(f"unit {unit}: {one_line(answer.message)}")
    return answer
