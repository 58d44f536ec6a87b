"""``collapipe resume``: a run goes on from its last checkpoint, as if it had never stopped."""

import re
from collections.abc import Sequence
from pathlib import Path

from collapipe import config
from collapipe.cli.run import quieten, start
from collapipe.config.composing import CONF
from collapipe.config.overrides import merged, setting
from collapipe.config.trust import check_addresses, check_overrides
from collapipe.deployment.server_folder import with_folder
from collapipe.errors import ConfigError, one_line
from collapipe.runs.folder import check_plain, read_overrides
from server_app.checkpoints.resumption import check_goes_on, load_checkpoint

_REFERENCE = re.compile(r"\$\\*\{")  # also where the parser is yet to take a backslash out


def resume_run(
    run_dir: Path, overrides: Sequence[str], checkpoint: str | None, trusted: Sequence[str]
) -> None:
    """Train the rounds that are left. Raises ``CollaPipeError`` or ``KeyboardInterrupt``.

    Whatever is wrong with the folder, the checkpoint or the ``overrides`` is said before anything
    is changed or started.
    """
    quieten()
    check_plain(run_dir)
    overrides = with_folder(overrides)
    here = setting("hydra.run.dir", run_dir.resolve())
    began_with = [*_saved(run_dir, here), here]
    check_overrides(began_with, trusted)
    began = config.load_overrides(began_with)
    found = load_checkpoint(began, checkpoint)
    settled = merged(began_with, [*overrides, here])
    settings = _load(run_dir, settled, overrides)
    check_goes_on(settings, found)
    check_addresses(settings, overrides)
    start(settled, settings, found.name)


def _load(run_dir: Path, settled: Sequence[str], overrides: Sequence[str]) -> config.Settings:
    """The settings of all options. Raises ``ConfigError`` that names the groups among those given
    now, such as ``task=ner``, where options that the run began with are unknown to them."""
    try:
        return config.load_overrides(settled)
    except ConfigError as error:
        groups = [each for each in overrides if (CONF / each.partition("=")[0]).is_dir()]
        if not groups:
            raise
        raise ConfigError(
            f"{run_dir}: a run goes on as it began, and {', '.join(groups)} does not fit its other "
            f"options ({error}); leave it out, or begin a new run"
        ) from error


def _saved(run_dir: Path, here: str) -> list[str]:
    """The options in the folder but for its own place.

    The folder may be somebody else's: raises ``ConfigError`` for options of Hydra itself, which
    lead to code, and for references, which may look up what this machine's environment holds.
    """
    saved = read_overrides(run_dir)
    try:
        left = merged(_without_replaced(saved), [here])[:-1]
    except ConfigError as error:
        raise ConfigError(f"{run_dir / 'overrides.json'}: {error}") from error
    for each in left:
        if each.strip().lstrip("+~").startswith("hydra") and not each.startswith("hydra.sweep."):
            why = "an option of Hydra, not of a run; remove it"
        elif _REFERENCE.search(each):
            why = "a reference, which is not followed here; write its value in its place"
        else:
            continue
        raise ConfigError(f"{run_dir / 'overrides.json'}: {one_line(each)}: {why}")
    return left


def _without_replaced(saved: Sequence[str]) -> list[str]:
    """Without references that a later value takes the place of, as a run's paths do."""
    later = [saved[number:] for number in range(1, len(saved) + 1)]
    return [
        each
        for each, others in zip(saved, later, strict=True)
        if not _REFERENCE.search(each) or len(merged([each], others)) > len(others)
    ]
