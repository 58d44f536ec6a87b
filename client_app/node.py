"""What a node has of a run: its settings, its control unit, frozen weights, and kept state."""

import functools
from collections.abc import Callable, Mapping

import torch
from flwr.app import Context

from client_app.control_unit import ControlUnit
from client_app.fixed_parts import FixedParts
from collapipe import owner
from collapipe.config import Settings
from collapipe.errors import ConfigError, WireError
from collapipe.models.split import EMBEDDING, HEAD
from collapipe.owner_account import OwnerAccount
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer, check_tokenizer
from collapipe.wire import messages, records
from collapipe.wire.frozen_store import FrozenStore, default_folder
from collapipe.wire.kept_file import KeptFile


def setup_of(context: Context) -> messages.Setup:
    """Return the run's setup as ``state`` has stored it. Raises ``WireError`` without one."""
    if messages.Setup.__name__ not in context.state:
        raise WireError("this unit has no setup of the run yet; send a state request first")
    return records.unpack(messages.Setup, context.state)


def unit_of(context: Context, settings: Settings) -> ControlUnit:
    """Return the node's control unit, which is made once."""
    cached = cached_units(settings.federation.num_units)
    return cached(settings, number_of(context), setup_of(context).tokenizer)


@functools.lru_cache(maxsize=1)  # a process serves one run
def cached_units(num_units: int) -> Callable[[Settings, int, str], ControlUnit]:
    """Return a function that makes the run's control units and keeps all of them.

    Units take turns in every round, so a smaller cache would miss each time.
    """

    @functools.lru_cache(maxsize=num_units)
    def made(settings: Settings, unit: int, tokenizer: str) -> ControlUnit:
        return ControlUnit(settings, unit, Tokenizer.unpack(tokenizer))

    return made


def settings_of(context: Context) -> Settings:
    """Read the run's options and the owner's files, which takes long: once a message."""
    return owner.load_settings(setup_of(context).settings, context.node_config)


def received(text: str, context: Context) -> Settings:
    """Return the settings in the server's message. Raises ``WireError`` if they differ from those
    that ``rows`` or ``state`` has stored."""
    kind: type[messages.RowsRequest | messages.Setup]
    for kind in (messages.RowsRequest, messages.Setup):
        if kind.__name__ in context.state and records.unpack(kind, context.state).settings != text:
            raise WireError("the run's options have changed; a run has the same in all rounds")
    settings = owner.load_settings(text, context.node_config)
    checked_account(context, settings)
    return settings


def checked_account(context: Context, settings: Settings) -> OwnerAccount | None:
    """Return the owner's privacy account, if there is one. Raises ``BudgetSpentError`` if its rest
    does not suffice for a round of this run."""
    if (account := owner.account_of(context.node_config)) is not None:
        account.check(settings.privacy)
    return account


def number_of(context: Context) -> int:
    """Return the unit's number: the one from the server, or else the one in the node's
    configuration."""
    if messages.Setup.__name__ in context.state and (number := setup_of(context).unit) is not None:
        return number
    return int(context.node_config["partition-id"])


@functools.lru_cache(maxsize=1)  # a process serves one run
def try_tokenizer(packed: str) -> None:
    """Raise ``WireError`` if the server's tokeniser is invalid."""
    try:
        check_tokenizer(packed, "packed")
    except ConfigError as error:
        raise WireError(f"the run's tokeniser: {error}") from error


def fixed_parts(context: Context, settings: Settings, unit: ControlUnit) -> FixedParts:
    """Return the run's frozen weights. With real devices only both ends are used here."""
    setup, devices = setup_of(context), unit.devices is not None
    return cached_parts(settings, setup.tokenizer, (*setup.frozen.items(),), devices)


@functools.lru_cache(maxsize=1)  # a process serves one run; its units share the weights
def cached_parts(
    settings: Settings, tokenizer: str, frozen: tuple[tuple[str, str], ...], devices: bool
) -> FixedParts:
    """Return the frozen weights of the parts whose digests are ``frozen``."""
    digests = dict(frozen)
    return FixedParts(
        digests,
        settings.model,
        Tokenizer.unpack(tokenizer).vocabulary,
        getattr(torch, settings.pipeline.dtype),
        [FrozenStore(default_folder())],
        used=(EMBEDDING, HEAD) if devices else digests,
        device=settings.unit_device,
    )


def kept_groups(context: Context) -> dict[str, Tensors]:
    """Read the groups that the unit kept after its last round, from its state or from a file that
    the state names. Empty before the first round."""
    if KeptFile.__name__ in context.state:
        return records.unpack(KeptFile, context.state).read()
    return records.unpack_groups(context.state)


def keep_groups(context: Context, groups: Mapping[str, Tensors]) -> None:
    """Replace the groups that the unit keeps."""
    if (file := KeptFile.of(context.node_id, context.node_config)) is not None:
        file.write(groups)
        context.state.update(records.pack(file))
        return
    for key in messages.KEPT:
        context.state.pop(key, None)
    context.state.update({key: records.pack_tensors(each) for key, each in groups.items() if each})
