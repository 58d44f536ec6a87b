"""Who of a deployed federation is there, and which run is under way, as its SuperLink tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from collapipe.deployment.checking import superlink
from collapipe.deployment.flower import Flower
from collapipe.deployment.server_folder import CONNECTION, ServerFolder
from collapipe.deployment.serving import keys
from collapipe.errors import LinkError

_NOBODY: Mapping[str, Any] = {"status": "not admitted"}
_NEVER = "registered"  # Flower's word for a node that never came


@dataclass(frozen=True, slots=True)
class UnitThere:
    """A unit, whether it is online, and when it came or went, as of ``time.time``; None: never."""

    name: str
    state: str
    since_s: float | None


@dataclass(frozen=True, slots=True)
class RunThere:
    """A run that has not ended; its folder, once its app has begun."""

    number: str
    state: str
    folder: Path | None


def overview(folder: ServerFolder) -> tuple[list[UnitThere], list[RunThere]]:
    """The units of ``server.yaml`` in their order, then others that the authority has signed; and
    the runs under way.

    Raises ``ConfigError`` for a folder that is none, ``LinkError`` where its SuperLink does not
    answer.
    """
    named = folder.settings().units
    if error := superlink(folder).error:
        raise LinkError(error)
    flower = Flower.at(folder.flower_home)
    signed, known = keys(folder), folder.nodes()
    nodes = {each["node-id"]: each for each in flower.ask("supernode", "list", CONNECTION)["nodes"]}
    units = [
        _unit(name, nodes.get(known.get(signed.get(name, ""), ""), _NOBODY))
        for name in [*named, *sorted(signed.keys() - {*named})]
    ]
    runs = [
        RunThere(each["run-id"], each["status"], folder.run_dir(each["run-id"]))
        for each in flower.ask("list", CONNECTION)["runs"]
        if not each["status"].startswith("finished")
    ]
    return units, runs


def _unit(name: str, node: Mapping[str, Any]) -> UnitThere:
    state = str(node["status"])
    if state == _NEVER:
        state = "never seen"
    changed = node.get(f"{state}-at", "N/A")
    since_s = None if changed == "N/A" else datetime.fromisoformat(changed).timestamp()
    return UnitThere(name, state, since_s)
