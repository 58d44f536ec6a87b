"""``collapipe resume``: continue a run from a checkpoint, as if it had never stopped."""

import re
from collections.abc import Sequence
from pathlib import Path

from collapipe import config
from collapipe.cli.run import quieten, start
from collapipe.config.overrides import merged, parse, setting
from collapipe.config.settings import CONF
from collapipe.config.trust import check_plugins
from collapipe.deployment.server_folder import with_folder
from collapipe.errors import ConfigError, faults_of, one_line
from collapipe.runs.confirmation import check_confirmed
from collapipe.runs.folder import check_plain, check_there, read_overrides
from server_app.checkpoints.resumption import check_resumable, load_checkpoint

_REFERENCE = re.compile(r"\$\\*\{")  # also with backslashes that the parser will remove


def resume_run(
    run_dir: Path, overrides: Sequence[str], checkpoint: str | None, trusted: Sequence[str]
) -> None:
    """Train the remaining rounds. Raises ``CollaPipeError`` or ``KeyboardInterrupt``.

    Errors in the folder, the checkpoint or the ``overrides`` are raised before anything is changed
    or started.
    """
    quieten()
    check_there(run_dir, run_dir / "overrides.json")  # else links of any folder would be refused
    check_plain(run_dir)
    if folders := [each for each in overrides if each.startswith("hydra.")]:
        raise ConfigError(f"{folders[0]}: has no effect; a resumed run stays in {run_dir}")
    overrides = with_folder(overrides)
    here = setting("hydra.run.dir", run_dir.resolve())
    moved = [each for each in overrides if each.startswith("cluster.file=")]  # the old one is gone
    began_with = merged(_saved(run_dir, here), [*moved, here])
    _check_inventory(began_with)
    began = config.outline(began_with)
    check_plugins(began.tree, trusted)
    found = load_checkpoint(config.complete(began), checkpoint)
    settled = merged(began_with, [*overrides, here])
    settings = _load(run_dir, settled, overrides)
    check_resumable(settings, found)
    check_confirmed(settings, {each.key_or_group for each in parse(overrides)})
    start(settings, found.name)


def _check_inventory(began_with: Sequence[str]) -> None:
    """Raise ``ConfigError`` if the run's inventory is gone, as one of ``collapipe up`` is."""
    for each in parse(began_with):
        if each.key_or_group == "cluster.file" and not Path(str(file := each.value())).exists():
            raise ConfigError(
                f"cluster.file={file}: is gone; start the devices again, such as with collapipe up "
                "--inventory FILE, and add cluster.file=FILE"
            )


def _load(run_dir: Path, settled: Sequence[str], overrides: Sequence[str]) -> config.Settings:
    """Return the settings of all options. Raises ``ConfigError``, which names groups chosen now,
    such as ``task=ner``, if the run's first options do not fit them."""
    try:
        return config.load_overrides(settled)
    except ConfigError as error:
        groups = [each for each in overrides if (CONF / each.partition("=")[0]).is_dir()]
        if not groups:
            raise
        raise ConfigError(
            f"{run_dir}: {', '.join(groups)} does not fit the run's other options ({error}); leave "
            "it out, or begin a new run"
        ) from error


def _saved(run_dir: Path, here: str) -> list[str]:
    """Return the options in the folder, without the folder's own path.

    The folder may be untrusted. So ``ConfigError`` is raised for options of Hydra, which could run
    code, and for references, which could read this machine's environment.
    """
    saved, file = read_overrides(run_dir), run_dir / "overrides.json"
    with faults_of(file):
        left = merged(_without_replaced(saved), [here])[:-1]
    for each in left:
        if each.strip().lstrip("+~").startswith("hydra") and not each.startswith("hydra.sweep."):
            why = "an option of Hydra, not of a run; remove it"
        elif _REFERENCE.search(each):
            why = "a reference, which is not followed here; write its value in its place"
        else:
            continue
        raise ConfigError(f"{file}: {one_line(each)}: {why}")
    return left


def _without_replaced(saved: Sequence[str]) -> list[str]:
    """Remove references that a later value of the same option replaces, such as a run's paths."""
    return [
        each
        for number, each in enumerate(saved, 1)
        if not _REFERENCE.search(each) or len(merged([each], saved[number:])) > len(saved) - number
    ]
