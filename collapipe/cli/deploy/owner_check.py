"""``collapipe deploy check unit.yaml``: the owner's rows and devices, and a step of training."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

from datasets import Dataset

from collapipe.cli.device.survey import ask_all, dialer_of
from collapipe.data.files import read_file
from collapipe.deployment.checking import Finding
from collapipe.errors import CollaPipeError, ConfigError, one_line
from collapipe.formatting import amount, counted
from collapipe.inventory.cluster import ANY_COST
from collapipe.inventory.file import read_inventory
from collapipe.owner_file import OwnerSection

_TRAIN = "train_file"
_FILES = _TRAIN, "validation_file", "test_file"
_COLUMN = "_column"
_CLUSTER, _DRY_RUN = "devices", "dry run"
_STAND_IN, _FEW = ("no text", "of any row"), 8  # texts; rows of a step


def check_owner(file: Path, owner: OwnerSection) -> Iterator[Finding]:
    """Check the rows and devices of the owner's ``file``; if no check found a problem, train for a
    step on them."""
    texts: Sequence[str] = () if owner.data.train_file else _STAND_IN
    wrong = False
    for found, rows in _rows(file, owner):
        yield found
        wrong |= found.error is not None
        if rows is not None and found.what == _TRAIN:
            texts = _texts(rows)
    for found, busy in _devices(file, owner):
        yield found
        wrong |= found.error is not None or busy
    if texts and not wrong:
        yield _step(file, owner, texts)


def _rows(file: Path, owner: OwnerSection) -> Iterator[tuple[Finding, Dataset | None]]:
    """Yield a finding about each file of rows, and its rows if a run can read them."""
    chosen = owner.data.model_dump(exclude_none=True)
    wanted = {value: key for key, value in chosen.items() if key.endswith(_COLUMN)}
    for option in _FILES:
        path = file.parent / str(chosen.get(option))
        if option not in chosen or (option == _TRAIN and not path.exists()):  # has a finding
            continue
        try:
            rows = read_file(path, f"data.{option}", wanted).flatten()
        except CollaPipeError as error:
            yield Finding.of(option, error, f"data.{option} in {file}"), None
            continue
        there = ", ".join(rows.column_names)
        found = f"{counted(len(rows), 'row')} with the columns {there}"
        absent = wanted.keys() - {*rows.column_names}
        missing = ", ".join(f"{key}: {name}" for name, key in wanted.items() if name in absent)
        problem = f"{path}: has no column for {missing}, but {there}" if missing else None
        yield Finding(option, found, problem, f"correct it in {file}"), rows


def _texts(rows: Dataset) -> list[str]:
    """Return the texts of the first rows, for a step of training."""
    first = rows.select(range(min(_FEW, len(rows))))
    texts = [" ".join(each for each in row.values() if isinstance(each, str)) for row in first]
    return [text or _STAND_IN[0] for text in texts] * (2 if len(texts) == 1 else 1)


def _step(file: Path, owner: OwnerSection, texts: Sequence[str]) -> Finding:
    """Train a small model for a step, without the server."""
    from client_app.dry_run import train_one_step  # imports torch

    try:
        report = train_one_step(owner, file.parent, texts)
    except CollaPipeError as error:
        return Finding.of(_DRY_RUN, error, f"cluster in {file}")
    except RuntimeError as error:  # torch's, such as full memory
        way_out = f"free memory, or choose another runtime.torch_device in {file}"
        return Finding(_DRY_RUN, error=one_line(error), way_out=way_out)
    where = ", ".join(each.name for each in report.devices) or "simulated devices"
    return Finding(_DRY_RUN, f"a step of training on {where}: loss {report.losses[0]:.2f}")


def _devices(file: Path, owner: OwnerSection) -> Iterator[tuple[Finding, bool]]:
    """Yield a finding about each device of the inventory's first cluster, which is the unit's, and
    whether the device is busy. Yield nothing without an inventory."""
    if owner.cluster is None:
        return
    inventory = file.parent / owner.cluster.file
    try:
        section = read_inventory(inventory, ANY_COST).section
        dialer = dialer_of(inventory, section)
    except ConfigError as error:
        yield Finding.of(_CLUSTER, error, f"cluster.file in {file}"), False
        return
    first = section.clusters[0]
    if not any(each.address for each in first.devices):
        simulated = f"{counted(len(first.devices), 'device')}, simulated: no addresses"
        yield Finding(_CLUSTER, simulated), False
        return
    for each in ask_all(section.model_copy(update={"clusters": [first]}), dialer)[0]:
        what, status = f"device {each.name}", each.status
        way_out = f"collapipe device check {quote(str(inventory))}"
        gives = amount(status.memory_bytes, "B") if status else ""
        busy = bool(status and status.busy)
        doing = ", works for a control unit: no dry run" if busy else ""
        yield Finding(what, f"{gives} of memory{doing}", each.error, way_out), busy
