"""``collapipe deploy check unit.yaml``: check the owner's rows and devices without a run."""

from collections.abc import Iterator
from pathlib import Path

from client_app.survey import ANSWER_S, ask_all, own_credentials
from collapipe.data.files import read_file
from collapipe.deployment.checking import Finding
from collapipe.errors import CollaPipeError, ConfigError
from collapipe.formatting import amount, counted
from collapipe.inventory.cluster import ANY_COST
from collapipe.inventory.file import read_inventory
from collapipe.owner_file import OwnerSection
from collapipe.wire.dialing import Dialer

_FILES = "train_file", "validation_file", "test_file"
_COLUMN = "_column"
_CLUSTER = "devices"


def check_rows(file: Path, owner: OwnerSection) -> Iterator[Finding]:
    """Read every file of rows that the owner's ``file`` names.

    Yields its number of rows and its columns, or why a run could not read it.
    """
    chosen = owner.data.model_dump(exclude_none=True)
    wanted = {value: key for key, value in chosen.items() if key.endswith(_COLUMN)}
    for option in _FILES:
        path = file.parent / str(chosen.get(option))
        if option not in chosen or (option == _FILES[0] and not path.exists()):  # has a finding
            continue
        try:
            rows = read_file(path, f"data.{option}", wanted).flatten()
        except CollaPipeError as error:
            yield Finding.of(option, error, f"data.{option} in {file}")
            continue
        there = ", ".join(rows.column_names)
        found = f"{counted(len(rows), 'row')} with the columns {there}"
        missing = [
            f"{key}: {name}" for name, key in wanted.items() if name not in rows.column_names
        ]
        problem = (
            f"{path}: has no column for {', '.join(missing)}, but {there}" if missing else None
        )
        yield Finding(option, found, problem, f"correct it in {file}")


def check_devices(file: Path, owner: OwnerSection) -> Iterator[Finding]:
    """Query the devices of the unit: the first cluster of the owner's inventory.

    Yields each device's memory, or why it cannot be used. Without an inventory it yields nothing.
    """
    if owner.cluster is None:
        return
    inventory = file.parent / owner.cluster.file
    try:
        section = read_inventory(inventory, ANY_COST).section
        dialer = Dialer(own_credentials(inventory, section), ANSWER_S)
    except ConfigError as error:
        yield Finding.of(_CLUSTER, error, f"cluster.file in {file}")
        return
    first = section.clusters[0]
    if not any(each.address for each in first.devices):
        yield Finding(_CLUSTER, f"{counted(len(first.devices), 'device')}, simulated: no addresses")
        return
    for each in ask_all(section.model_copy(update={"clusters": [first]}), dialer)[0]:
        what, status = f"device {each.name}", each.status
        way_out = f"collapipe device check {inventory}"
        gives = amount(status.memory_bytes, "B") if status else ""
        yield Finding(what, f"{gives} of memory", each.error, way_out)
