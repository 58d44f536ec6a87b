"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from collapipe.errors import ConfigError

RunDir = Annotated[Path, Argument(help="Folder of a run.")]
Overrides = Annotated[
    list[str] | None,
    Argument(help="Options KEY=VALUE, e.g. task=multi30k federation.rounds=5"),
]
Trust = Annotated[list[str] | None, Option(help="Package with plug-ins that the folder may use.")]
Unit = Annotated[int | None, Option(help="Unit of the model, if models were not averaged.")]
TorchDevice = Annotated[
    str | None, Option(help="auto, cpu, cuda, cuda:NUMBER or mps; default: server.torch_device.")
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


def picture(file: Path | None) -> Path | None:
    """Check the file of ``--plot`` before anything is computed."""
    if file is None:
        return None
    if file.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--plot {file}: must end in .svg or .png")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise ConfigError(f"--plot {file}: is a folder; name a file")
    return file
