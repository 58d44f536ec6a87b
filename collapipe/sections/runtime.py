"""Where the apps run and on which torch device, their link, and where curves are sent."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from collapipe.errors import ConfigError
from collapipe.sections.numbers import NotNegative, Positive

_HOST_AND_PORT = re.compile(r"(\[.*\]|[^:]*):\d+")
_WILDCARDS = "0.0.0.0", "::", "[::]"  # noqa: S104 - to refuse them as addresses to dial


def _kind_of_device(name: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", name) is None:
        raise ValueError("must be one of auto, cpu, cuda, cuda:NUMBER, mps")
    return name


# see ``collapipe.process.torch_device``
TorchDevice = Annotated[str, AfterValidator(_kind_of_device)]


@dataclass(frozen=True)
class RuntimeSettings:
    """Where the apps run, and the torch device of control units."""

    name: Literal["local", "simulation", "deployment"]
    torch_device: TorchDevice
    federation: str | None = None  # only for a deployment

    def __post_init__(self) -> None:
        if self.name == "deployment" and self.federation is None:
            raise ConfigError(
                "runtime.federation=null: a deployment needs the folder of collapipe deploy init, "
                "or a name of Flower's configuration"
            )


@dataclass(frozen=True)
class ServerSettings:
    """The torch device on which the server trains heads and evaluates."""

    torch_device: TorchDevice


@dataclass(frozen=True)
class TrackingSettings:
    """Where curves are sent in addition to the run's folder; ``mlflow`` is a tracking URI."""

    mlflow: str | None


@dataclass(frozen=True)
class LinkSettings:
    """The decoder link: the server's addresses to listen and to dial, limits and timeouts."""

    host: str
    port: Annotated[int, Field(ge=0, le=65535)]
    advertise: str | None
    max_message_bytes: Annotated[int, Field(ge=2**16, lt=2**31)]
    frame_timeout_s: Positive
    reconnect_s: NotNegative

    def __post_init__(self) -> None:
        if self.host in _WILDCARDS and self.advertise is None:
            raise ConfigError(
                f"link.host={self.host}: listens on all addresses, so units need one to dial; set "
                "link.advertise to an address that they reach, as HOST or HOST:PORT"
            )

    def dialled(self, port: int) -> str:
        """Return the address that units dial if the server listens on ``port``."""
        host = self.advertise or self.host
        return host if _HOST_AND_PORT.fullmatch(host) else address(host, port)


def address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    host = host.removeprefix("[").removesuffix("]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
