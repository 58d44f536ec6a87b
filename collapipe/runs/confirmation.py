"""Options of a run's folder that reach other machines: to resume it a user must repeat them."""

import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from collapipe.config import Settings
from collapipe.credentials.addresses import host_and_port
from collapipe.credentials.verified_channel import is_loopback
from collapipe.errors import ConfigError, one_line

_STARTED_BY = "COLLAPIPE_STARTED_BY"  # environment variable: the command in front of a run's own


@contextmanager
def started_by(*words: str) -> Iterator[None]:
    """Let commands that resume the runs of child processes begin with these words."""
    os.environ[_STARTED_BY] = shlex.join(["collapipe", *words, "--"])
    try:
        yield
    finally:
        del os.environ[_STARTED_BY]


def check_confirmed(settings: Settings, given: Collection[str]) -> None:
    """Raise ``ConfigError`` if a run's folder names other machines and the user did not confirm.

    Such options train on other machines, send curves, or listen on the network. An option that the
    user has ``given`` again is confirmed.
    """
    options = {**_addresses(settings), **_devices(settings)}
    for option, (value, what, safe) in options.items():
        if option not in given:
            instead = f", or else add {option}={safe}" if safe else ""
            raise ConfigError(
                f"{option}={one_line(value)}: the run's folder asks {what}; to do so repeat it as "
                f"an option{instead}"
            )


def resume_command(settings: Settings) -> str:
    """Return the command that resumes a run, with the options that ``check_confirmed`` requires."""
    from collapipe.config.overrides import typed  # imports Hydra

    options, federation = _addresses(settings), settings.runtime.federation
    if federation is None:  # else units have their owners' devices
        with suppress(ConfigError):  # the inventory is gone or has changed, as the command will say
            options |= _devices(settings)
    elif Path(federation).is_dir():  # which has the options of links
        options = {name: each for name, each in options.items() if not name.startswith("link.")}
    command = shlex.split(os.environ.get(_STARTED_BY, "collapipe"))
    if len(command) > 1:
        options.pop("runtime.federation", None)  # one of its own, which is gone with the command
    repeated = (typed(name, value) for name, (value, _, _) in options.items())
    return shlex.join([*command, "resume", settings.run_dir, *repeated])


def _addresses(settings: Settings) -> dict[str, tuple[str, str, str | None]]:
    """Return the values of options that name other machines, what they ask for, and harmless
    values."""
    link, federation, mlflow = settings.link, settings.runtime.federation, settings.tracking.mlflow
    requested = {
        "runtime.federation": (federation, "to train there", None),
        "tracking.mlflow": (mlflow, "to send curves there", "null"),
        "link.host": (link.host, "to listen to other machines", "127.0.0.1"),
        "link.advertise": (link.advertise, "to have units dial there", "null"),
    }
    return {
        option: (str(value), what, safe)
        for option, (value, what, safe) in requested.items()
        if value and not is_loopback(value)
    }


def _devices(settings: Settings) -> dict[str, tuple[str, str, str | None]]:
    """Return the inventory if it names devices on other machines, which see activations."""
    from collapipe.inventory.cluster import DeviceCluster  # imports torch

    cluster = settings.build("cluster")
    if not isinstance(cluster, DeviceCluster) or all(
        is_loopback(host_and_port(each)[0]) for each in cluster.addresses
    ):
        return {}
    return {"cluster.file": (cluster.file, "to train on its devices on other machines", None)}
