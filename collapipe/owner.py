"""A unit's owner: options that only the owner may set, and values hidden from the server."""

import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from collapipe import config
from collapipe.config import Settings
from collapipe.config.resolved import Resolved, parsed, targets
from collapipe.config.settings import CONF
from collapipe.credentials.addresses import host_and_port
from collapipe.credentials.bundle import AUTHORITY, KEY
from collapipe.credentials.keys import fingerprint, read_key
from collapipe.data.hub import is_hub_id
from collapipe.errors import (
    BudgetSpentError,
    CancelledRoundError,
    ConfigError,
    DataError,
    LinkError,
    NonFiniteLossError,
    OwnerError,
    RoundFailedError,
    WireError,
    one_line,
)
from collapipe.inventory.cluster import ANY_COST, DeviceCluster, InventoryCluster
from collapipe.inventory.file import read_inventory
from collapipe.owner_account import KEPT, OwnerAccount
from collapipe.owner_file import OwnerSection, read_owner
from collapipe.process import files
from collapipe.runs.rows import sends_words
from collapipe.sections import DataSettings
from collapipe.wire.messages import LinkAddress

_log = logging.getLogger(__name__)
_ANY, _SHORT = "owner", "data"  # keys of a node's configuration
_NUMBERS = "seed", "batch_size"
_SECTIONS = """
adapter channel cluster compression data decoder environment evaluation federation framework link
model optimizer pipeline privacy runtime server server_optimizer strategy task tracking
"""
_PLUGINS = "channel", "cluster", "environment", "model", "partitioner", "strategy", "task"
# Options of the section data that the server may set, for itself or for all units.
_SERVERS = "root", "validation_file", "test_file"
_SHARED = "shuffle", "max_eval_samples", "tokenizer", "tokenizer_min_rows"
_DEFAULTS = {field.name: field.default for field in fields(DataSettings)}
_PARTITIONER = "flwr_datasets.partitioner.IidPartitioner"  # as in conf/partitioner/iid.yaml
_OF_TASKS = "root", "synthetic"  # options of tasks that repeat options of the section data
_MIN_ROWS = "data.tokenizer_min_rows"
_NO_OWNER = OwnerSection.model_construct()  # of a simulated unit, which has no rows of its own
# Messages of these errors contain no values of the owner's rows and files.
_OF_THE_RUN = (
    BudgetSpentError,
    CancelledRoundError,
    LinkError,
    NonFiniteLossError,
    OwnerError,
    RoundFailedError,
    WireError,
)


def load_settings(text: str, node_config: Mapping[str, Any]) -> Settings:
    """Return a unit's settings: the run's options, and the owner's if the unit has an owner.

    ``text`` has the run's options as the server sends them. Raises ``OwnerError`` if the run sets
    an option that belongs to the owner, or violates the owner's privacy settings. Raises
    ``ConfigError`` for invalid options.
    """
    if not has_owner(node_config):
        return config.load_text(text)
    try:
        tree = parsed(text).tree
    except ConfigError as error:  # the server's fault, not the owner's
        raise OwnerError(f"the unit refuses the run: {error}") from error
    _check(tree)
    owner, folder = _read(node_config)
    settings = config.load_text(Resolved(tree=_with_own(tree, owner, folder)).text)
    least = owner.data.tokenizer_min_rows or 1
    if sends_words(settings) and settings.data.tokenizer_min_rows < least:
        raise _refusal(_MIN_ROWS, f"must be at least {least} if units send their words")
    for option, fault in owner.privacy.lacking(settings):
        raise _refusal(option, fault)
    return settings


def has_owner(node_config: Mapping[str, Any]) -> bool:
    """Whether the unit has an owner with rows, and is not simulated on a part of common rows."""
    return _ANY in node_config or _SHORT in node_config


def name_of(node_config: Mapping[str, Any]) -> str:
    """Return the owner's name for the unit; empty if it has no name."""
    return _read(node_config)[0].name or ""


def signing_key(node_config: Mapping[str, Any]) -> EllipticCurvePrivateKey | None:
    """Return the key of the owner's credentials; None without credentials.

    Raises ``ConfigError`` if the key cannot be read.
    """
    owner, folder = _read(node_config)
    if owner.credentials is None:
        return None
    file = folder / owner.credentials / KEY
    return read_key(files.read(file, "restore it", private=True), file)


def peers_of(node_config: Mapping[str, Any]) -> frozenset[str] | None:
    """Return fingerprints of the units that may be in a sum with this one; None: any unit."""
    peers = _read(node_config)[0].privacy.peers
    if peers is None:
        return None
    own = signing_key(node_config)
    assert own is not None  # or the file was refused
    return frozenset(peers) - {fingerprint(own.public_key())}


def account_of(node_config: Mapping[str, Any]) -> OwnerAccount | None:
    """Return the account of the ε that all runs together spend on the owner's rows.

    Returns None if the owner sets no limit. The account of ``unit.yaml`` is in
    ``kept/unit.privacy.json`` in the same folder.
    """
    if _ANY not in node_config:
        return None
    owner, file = _read(node_config)[0], Path(str(node_config[_ANY])).resolve()
    limit, delta = owner.privacy.lifetime_epsilon, owner.privacy.lifetime_delta
    if limit is None:
        return None
    kept = file.parent / KEPT / f"{file.stem}.privacy.json"
    return OwnerAccount(owner.name or "the unit", kept, limit, delta)


def least_units_of(node_config: Mapping[str, Any]) -> int:
    """Return the least number of updates in a masked sum; 0 if the owner's file sets none."""
    return _read(node_config)[0].privacy.least_units or 0


def trusted_link(link: LinkAddress, node_config: Mapping[str, Any]) -> LinkAddress:
    """Return the address of the decoder link, checked against the owner's file.

    A deployed unit accepts only a server certificate that its owner's authority signed. Raises
    ``OwnerError`` for another certificate. Also raises it if the link is not on the server's host:
    it could be a socket file, or a host that only the owner can reach.
    """
    owner, folder = _read(node_config)
    if owner.server is None:
        return link
    host, _, port = link.address.rpartition(":")
    if host != owner.server.rpartition(":")[0] or not port.isdecimal():
        raise _refusal("link.advertise", "is another host than the server in the owner's file")
    if owner.credentials is None:
        return link
    if link.server_certificate:
        raise OwnerError(
            "the unit refuses the run: its link's certificate is not from the owner's authority"
        )
    authority = (folder / owner.credentials / AUTHORITY).read_bytes()
    name = host_and_port(owner.server)[0]
    return replace(link, server_certificate=authority, server_name=name)


def error_for_server(error: Exception, node_config: Mapping[str, Any]) -> Exception:
    """Return the error to send to the server, without the owner's values and paths.

    The unit's log has the full error.
    """
    if not has_owner(node_config) or isinstance(error, _OF_THE_RUN):
        return error
    _log.error("%s", error, exc_info=None if isinstance(error, ConfigError) else error)
    why = error.public_message if isinstance(error, DataError) else type(error).__name__
    return OwnerError(f"the unit cannot use what its owner gave it ({why}); its log says more")


def _check(tree: Mapping[str, Any]) -> None:
    """Raise ``OwnerError`` for options that the server may not set, or not to these values."""
    sections = _SECTIONS.split()
    for name in sorted({*tree, *sections} - {*_NUMBERS}):
        if name not in sections or not isinstance(tree.get(name), Mapping):
            raise _refusal(name, "is no section of a run's options")
    _check_rows(tree, {**_DEFAULTS, **tree["data"]})
    for option, target in targets(tree):
        group = option.removeprefix("data.")
        if group not in _PLUGINS or target not in _packaged_classes(group):
            raise _refusal(f"{option}._target_", "names a class that its group in conf/ lacks")
    name, files = tree["model"].get("name"), "and files on a unit's machine are its owner's"
    if name is not None and (not is_hub_id(str(name)) or Path(str(name)).exists()):
        raise _refusal("model.name", f"must be a hub's id, {files}")
    if "file" in tree["cluster"]:
        raise _refusal("cluster", f"names a file, {files}")


def _check_rows(tree: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Raise ``OwnerError`` if the run's section ``data`` or its task chooses an owner's rows."""
    units = tree["federation"].get("num_units")
    expected = {**_DEFAULTS, "partitioner": {"_target_": _PARTITIONER, "num_partitions": units}}
    for name in {*data, "partitioner"} - {*_SERVERS, *_SHARED}:
        if name not in expected or data.get(name) != expected[name]:
            raise _refusal(f"data.{name}", "is the owner's choice")
    for name in _OF_TASKS:
        if name in tree["task"] and tree["task"][name] != data[name]:
            raise _refusal(f"task.{name}", "names rows, which only the owner may choose")


def _refusal(option: str, fault: str) -> OwnerError:
    return OwnerError(f"the unit refuses the run: its option {one_line(option)} {fault}")


@functools.cache
def _packaged_classes(group: str) -> frozenset[str]:
    texts = (file.read_text("utf-8") for file in (CONF / group).glob("*.yaml"))
    return frozenset(name for text in texts for name in re.findall(r"_target_: *(\S+)", text))


def _read(node_config: Mapping[str, Any]) -> tuple[OwnerSection, Path]:
    """Return the owner's settings, which are empty if the unit has no owner, and the folder to
    which their paths are relative."""
    if not has_owner(node_config):
        return _NO_OWNER, Path()
    if _ANY in node_config:
        file = Path(str(node_config[_ANY]))
        return read_owner(file), file.parent
    path = Path(str(node_config[_SHORT]))
    option = "root" if path.is_dir() else "train_file"
    options = {"data": {option: str(path)}, "name": node_config.get("name")}
    return OwnerSection.model_validate(options), Path()


def _with_own(tree: Mapping[str, Any], owner: OwnerSection, folder: Path) -> dict[str, Any]:
    """Return the run's options with the owner's rows, devices, and uplink.

    Raises ``OwnerError`` if the run has measured channels and the owner has no inventory.
    """
    chosen = owner.data.model_dump(exclude_none=True)
    for option in {"root", "train_file", "validation_file", "test_file"} & chosen.keys():
        chosen[option] = str(folder / chosen[option])
    shared = {name: tree["data"].get(name, _DEFAULTS[name]) for name in _SHARED}
    data = {**_DEFAULTS, **chosen, **shared, "partitioner": None}
    task = {name: data[name] if name in _OF_TASKS else each for name, each in tree["task"].items()}
    own = {**on_machine(tree, owner, folder), "data": data, "task": task}
    if tree["evaluation"].get("where") == "auto":  # the server's choice for a run without rows
        own["evaluation"] = {**tree["evaluation"], "where": "server"}
    if "file" in tree["channel"]:  # the run's file has channels, the owner's has the uplink
        if owner.cluster is None:
            raise _refusal("channel", "needs an inventory, and the owner's file has no cluster")
        own["channel"] = {**tree["channel"], "file": str(folder / owner.cluster.file)}
    return own


def on_machine(tree: Mapping[str, Any], owner: OwnerSection, folder: Path) -> dict[str, Any]:
    """Return options with the devices and the machine of the owner's file in ``folder``.

    Raises ``ConfigError`` for a bad inventory.
    """
    own = {
        "pipeline": {**tree["pipeline"], "threads": owner.pipeline.threads},
        "runtime": {**tree["runtime"], "torch_device": owner.runtime.torch_device},
    }
    if owner.cluster is not None:
        file = folder / owner.cluster.file
        devices = read_inventory(file, ANY_COST).section.clusters[0].devices
        real = all(each.address for each in devices)
        kind = DeviceCluster if real else InventoryCluster
        target = f"{kind.__module__}.{kind.__qualname__}"
        own["cluster"] = {"_target_": target, "file": str(file), "num_units": 1}
    return {**tree, **own}
