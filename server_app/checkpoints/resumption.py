"""Choose the checkpoint from which a run is resumed, and check the run's current options."""

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from collapipe.config import Settings
from collapipe.config.resolved import flattened
from collapipe.errors import ConfigError, few_of, is_printable, one_line
from collapipe.formatting import counted
from collapipe.privacy.accounting import epsilon
from collapipe.runs.folder import RunFolder, check_sizes
from collapipe.runs.model import base_of, trained_form
from collapipe.runs.reading import read_shards
from collapipe.state import ClusterState
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from server_app.checkpoints.file import Checkpoint, tokenizer_digest
from server_app.checkpoints.folder import CheckpointFolder
from server_app.places import Places
from server_app.planning.scheduler import SchedulerState

_log = logging.getLogger(__name__)

# Options that may change between rounds, because no model and no plan depends on them; plans depend
# on an inventory's content, not on its place.
_FREE = (
    "cluster.file",
    "federation.rounds",
    "federation.eval_every",
    "federation.checkpoint_every",
    "federation.keep",
    "federation.min_units",
    "federation.wait_s",
    "federation.round_timeout_s",
    "federation.on_infeasible",
    "pipeline.threads",
)
_FREE_GROUPS = ("link.", "runtime.", "server.", "evaluation.", "tracking.")
_SHOWN = 4


def load_checkpoint(settings: Settings, name: str | None) -> Checkpoint:
    """Read the run's checkpoint ``name``, or the last one, and check it against the run's folder
    and options.

    Raises ``ConfigError`` if it does not exist, is damaged or belongs to another run. The message
    names the checkpoint before it, if there is one.
    """
    run_dir = Path(settings.run_dir)
    folder = CheckpointFolder(run_dir)
    names = folder.names()
    if not names:
        every = settings.federation.checkpoint_every
        first = f"the first follows round {every}" if every else "federation.checkpoint_every=0"
        raise ConfigError(
            f"{run_dir}: has no checkpoint ({first}); start again in another folder: collapipe run"
        )
    if name is not None and name not in names:
        raise ConfigError(f"--checkpoint {name}: {run_dir} has {few_of(names[::-1], ', ')}")
    name = name or names[-1]
    try:
        checkpoint = folder.read(name)
        if found := changed(checkpoint.configuration, settings.tree):
            raise ConfigError(
                f"{run_dir / 'checkpoints' / name}: belongs to a run with other options: "
                f"{_listed(found)}"
            )
        check_sizes(run_dir, checkpoint.progress.sizes)
        _check_units(checkpoint.progress.scheduler, settings.federation.num_units)
        _check_names(checkpoint.progress.names, settings.federation.num_units)
    except ConfigError as error:
        before = [other for other in names if int(other) < int(name)]
        offer = "there is no earlier checkpoint; begin a new run in another folder"
        if before:
            offer = f"to resume from the checkpoint before it, add --checkpoint {before[-1]}"
        raise ConfigError(f"{error}; {offer}") from error
    return checkpoint


def check_resumable(settings: Settings, checkpoint: Checkpoint) -> None:
    """Raise ``ConfigError`` if ``settings`` would change the result of the run, if no round is
    left, or if a file is invalid that is read once the run has returned to the checkpoint."""
    if found := changed(checkpoint.configuration, settings.tree):
        raise ConfigError(
            f"{settings.run_dir}: a resumed run must keep its options, but {_listed(found)}; set "
            "these as before, or begin a new run"
        )
    rounds, done = settings.federation.rounds, checkpoint.progress.round
    if rounds < done:
        raise ConfigError(
            f"federation.rounds={rounds}: the checkpoint of {settings.run_dir} is of round {done}; "
            f"set at least {done}, or choose an earlier checkpoint with --checkpoint"
        )
    if rounds == done and _complete(Path(settings.run_dir), rounds):
        raise ConfigError(
            f"{settings.run_dir}: completed after {counted(done, 'round')}; to train longer, raise "
            f"federation.rounds, such as federation.rounds={2 * done}"
        )
    read_shards(Path(settings.run_dir))
    account = RunFolder(Path(settings.run_dir), resumed=True).account()
    records = Path(settings.run_dir) / "metrics.jsonl"
    known = checkpoint.progress.sizes.get(records.name, 0)
    if rounds > done and records.is_file() and records.stat().st_size > known:
        _check_budget(settings, account)


def _check_budget(settings: Settings, account: Mapping[int, int]) -> None:
    """Raise ``ConfigError`` if no unit may take part in a further round, so that the rounds after
    the checkpoint could not be repeated. With ``noise_seed`` repeated rounds are not charged."""
    limit = settings.privacy.max_epsilon
    if limit is None or settings.privacy.noise_seed is not None:
        return
    least = min(account.get(unit, 0) for unit in range(settings.federation.num_units))
    if epsilon(settings.privacy, max(least + 1, max(account.values(), default=0))) > limit:
        raise ConfigError(
            f"privacy.max_epsilon={limit:g}: is spent by the rounds of {settings.run_dir}: those "
            "after the checkpoint cannot be repeated; use the run's model, or begin a new run"
        )


def check_model(
    folder: RunFolder, settings: Settings, checkpoint: Checkpoint, tokenizer: Tokenizer
) -> None:
    """Raise ``ConfigError`` if the ``tokenizer`` or the frozen weights have changed since the run
    began, or if the checkpoint's weights do not fit the model.

    The tokeniser comes from the run's folder, or from the training rows if the folder has none.
    """
    if tokenizer_digest(tokenizer) != checkpoint.progress.tokenizer:
        raise ConfigError(
            f"{folder.path}: the tokeniser has changed since the run began; restore its "
            "model/tokenizer.json and model/model.json, or begin a new run"
        )
    if settings.framework.train:
        base = base_of(folder.path, settings, tokenizer.vocabulary)
        if checkpoint.progress.frozen not in (None, base.digests):
            raise ConfigError(
                f"{folder.path}: the frozen weights have changed since the run began; restore its "
                "model/base.json, or begin a new run"
            )
        base.check()
        _check_fits(checkpoint, trained_form(settings, tokenizer.vocabulary))


def rewind_run(folder: RunFolder, settings: Settings, checkpoint: Checkpoint) -> None:
    """Restore the folder's content at the time of the checkpoint."""
    planned, rounds = checkpoint.configuration["federation"]["rounds"], settings.federation.rounds
    if settings.optimizer.decay == "linear" and rounds != planned:
        _log.warning(
            "optimizer.decay=linear: from now on the learning rate decays to 0 in round %d; until "
            "now it decayed to 0 in round %d",
            rounds,
            planned,
        )
    CheckpointFolder(folder.path).rewind(checkpoint.name, settings.federation.keep)
    folder.rewind(checkpoint.progress.sizes)


def others(checkpoint: Checkpoint, there: Collection[int], places: Places) -> str:
    """Describe units that are new or missing since the checkpoint, such as ``; new: cyd``. Empty if
    the units have not changed."""
    progress = checkpoint.progress
    clusters = progress.scheduler.roster.reported
    reported = {each.unit for each in clusters if isinstance(each, ClusterState)}
    known = reported | progress.history.rounds.keys() | {*progress.names.values()}
    found = {"new": {*there} - known, "missing": known - {*there}}
    return "".join(
        f"; {how}: {few_of(map(places.called, sorted(units)), ', ')}"
        for how, units in found.items()
        if units
    )


def _check_fits(checkpoint: Checkpoint, expected: Tensors) -> None:
    """Raise ``ConfigError`` unless the checkpoint's weights have the names, types and shapes of
    ``expected``."""
    training = checkpoint.training
    for weights in (training.weights, *training.own_models.values()):
        for name in sorted(weights.keys() | expected.keys()):
            found, like = _form(weights.get(name)), _form(expected.get(name))
            if found != like:
                raise ConfigError(
                    f"checkpoint {checkpoint.name}: its {name} is {found}, this model's {like}; "
                    "resume with the version and the files with which the run began"
                )


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return option → values then and now, for changed options that a run must not change."""
    before, after = (
        {option: json.dumps(value, ensure_ascii=False) for option, value in flattened(tree).items()}
        for tree in (then, now)
    )
    values = {
        option: (before.get(option, "not there"), after.get(option, "not there"))
        for option in sorted(before.keys() | after.keys())
        if option not in _FREE and not option.startswith(_FREE_GROUPS)
    }
    return {option: (was, is_) for option, (was, is_) in values.items() if was != is_}


def _listed(found: Mapping[str, tuple[str, str]]) -> str:
    differences = [one_line(f"{key} was {then}, is {now}") for key, (then, now) in found.items()]
    more = [f"{len(differences) - _SHOWN} more differ"] if len(differences) > _SHOWN else []
    return ", ".join([*differences[:_SHOWN], *more])


def _check_units(state: SchedulerState, num_units: int) -> None:
    """Raise ``ConfigError`` for a state of other units, or messages with control characters."""
    lists = (state.roster.reported, state.queues, state.losses, state.environment.units)
    counts = [len(each) for each in lists]
    others = [
        unit
        for unit, each in enumerate(state.roster.reported)
        if isinstance(each, ClusterState) and each.unit != unit
    ]
    if set(counts) != {num_units} or others:
        raise ConfigError(
            f"checkpoint: reports, queues, losses and conditions of {counts} units, "
            f"federation.num_units={num_units}"
        )
    failed = [*state.roster.excluded.values(), *state.roster.causes.values()]
    if not all(is_printable(each.kind + each.message) for each in failed):
        raise ConfigError("checkpoint: reports of units that are not printable")


def _check_names(names: Mapping[str, int], num_units: int) -> None:
    places = [*names.values()]
    sound = len({*places}) == len(places) and {*places} <= {*range(num_units)}
    if not sound or not all(name and is_printable(name) for name in names):
        raise ConfigError(
            f"checkpoint: names of units {one_line(dict(names))}, each needs one of {num_units} "
            "places for itself"
        )


def _complete(run_dir: Path, rounds: int) -> bool:
    file = run_dir / "summary.json"
    if not file.is_file():
        return False
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        return bool(summary["status"] == "completed" and summary["rounds_completed"] >= rounds)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{file}: not a run's summary ({one_line(error)}); remove it, the run writes it anew"
        ) from error


def _form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
