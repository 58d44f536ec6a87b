"""List a deployed federation's units and current runs, as its SuperLink reports them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from collapipe.deployment.control import ask
from collapipe.deployment.server_folder import ServerFolder
from collapipe.deployment.serving import keys

_NOT_ADMITTED: Mapping[str, Any] = {"status": "not admitted"}
_NEVER, _FINISHED = "registered", "finished"  # Flower's states: node never seen; run ended
ONLINE = "online"
_CHANGED_AT = {ONLINE: "last_activated_at", "offline": "last_deactivated_at"}


@dataclass(frozen=True, slots=True)
class UnitThere:
    """A unit, its state, and the time of its last change, as ``time.time``; None: never seen."""

    name: str
    state: str
    since_s: float | None


@dataclass(frozen=True, slots=True)
class RunThere:
    """A run that has not ended; it has a folder once its app has begun."""

    number: str
    state: str
    folder: Path | None


def overview(folder: ServerFolder) -> tuple[list[UnitThere], list[RunThere]]:
    """Return the units and the current runs of a server's folder.

    Units of ``server.yaml`` come first, in their order, then others that the authority has signed.
    Raises ``ConfigError`` if the folder is not a server's, and ``LinkError`` if its SuperLink does
    not reply.
    """
    named = folder.settings().units
    listed = ask(folder, "list-nodes", {}).get("nodes_info", ())
    nodes = {each.get("node_id"): each for each in listed}
    signed, known = keys(folder), folder.nodes() or {}
    units = [
        _unit(name, nodes.get(known.get(signed.get(name, ""), ""), _NOT_ADMITTED))
        for name in [*named, *sorted(signed.keys() - {*named})]
    ]
    runs = [
        RunThere(number, state, folder.run_dir(number))
        for number, state in run_states(folder).items()
        if not state.startswith(_FINISHED)
    ]
    return units, runs


def run_states(folder: ServerFolder, number: str | None = None) -> dict[str, str]:
    """Return the states of all runs by Flower's numbers, such as ``finished:completed``, or of one.

    Raises as ``overview``.
    """
    question = {} if number is None else {"run_id": number}
    listed = ask(folder, "list-runs", question).get("run_dict", {})
    states = {number: each.get("status", {}) for number, each in listed.items()}
    return {
        number: ":".join(filter(None, (each.get("status"), each.get("sub_status"))))
        for number, each in states.items()
    }


def _unit(name: str, node: Mapping[str, Any]) -> UnitThere:
    state = str(node.get("status", "unknown"))
    changed = node.get(_CHANGED_AT.get(state, ""))
    since_s = datetime.fromisoformat(changed).timestamp() if changed else None
    return UnitThere(name, "never seen" if state == _NEVER else state, since_s)
