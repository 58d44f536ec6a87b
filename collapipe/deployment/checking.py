"""What is wrong with a deployed federation's server or unit, found before a run finds it."""

import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from urllib.parse import quote as url_quote

from cryptography import x509

from collapipe import __version__
from collapipe.credentials.bundle import AUTHORITY
from collapipe.credentials.credentials import Credentials
from collapipe.credentials.dialing import host_and_port
from collapipe.credentials.keys import fingerprint, public_key
from collapipe.credentials.member import expires_soon
from collapipe.deployment.server_folder import ADMITTED, ServerFolder
from collapipe.deployment.serving import keys
from collapipe.deployment.unit_file import read_unit
from collapipe.errors import ConfigError
from collapipe.owner_file import OwnerSection

_TIMEOUT_S = 8.0
_CLOCKS_DIFFER_S = 300.0  # beyond which Flower refuses a node's signature


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, and what was found; an ``error`` says what is wrong, and the way out.
    A unit can take part all the same, or will be able to, where it does not ``bar`` it; the server
    has ``refused`` it where somebody must admit it first."""

    what: str
    found: str = ""
    error: str | None = None
    bars: bool = True
    refused: bool = False


def check_unit(file: Path) -> Iterator[Finding]:
    """An owner's file: its credentials, its rows, its server. Raises ``ConfigError`` where the file
    or the credentials cannot be read."""
    owner, own = read_unit(file)
    yield _expiry("certificate", own.expires)
    yield _rows(file, owner)
    yield from _server(str(owner.server), own)


def check_server(folder: ServerFolder) -> Iterator[Finding]:
    """A server's folder: its certificate, its ports, its units. Raises ``ConfigError`` where it is
    none."""
    settings = folder.settings()
    issued = x509.load_pem_x509_certificate(folder.certificate.read_bytes())
    yield _expiry("certificate", issued.not_valid_after_utc)
    yield _link_port(settings.link_port)
    yield _resolved(settings.host)
    yield superlink(folder)
    known, signed = folder.nodes(), keys(folder)
    for unit in settings.units:
        if unit not in signed:
            sign = (
                f"collapipe credentials sign {quote(str(folder.authority))} request.pem --role unit"
            )
            yield Finding(f"unit {unit}", error=f"has no valid certificate; {sign}")
        elif signed[unit] in known:
            yield Finding(f"unit {unit}", "may come")
        else:
            way_out = f"collapipe deploy serve {quote(str(folder.root))}"
            yield Finding(f"unit {unit}", error=f"is not admitted yet; {way_out} does")


def _expiry(what: str, expires: datetime) -> Finding:
    if expires_soon(expires):
        error = f"ends on {expires:%F}; renew it: docs/credentials.md"
        return Finding(what, error=error, bars=expires < datetime.now(UTC))
    return Finding(what, f"valid until {expires:%F}")


def _rows(file: Path, owner: OwnerSection) -> Finding:
    data = owner.data
    if data.name is not None:
        return Finding("rows", f"{data.name}, from the hub")
    path = file.parent / str(data.train_file or data.root)
    if not path.exists():
        return Finding("rows", error=f"{path}: is not there; correct data in {file}")
    return Finding("rows", str(path))


def _server(address: str, own: Credentials) -> Iterator[Finding]:
    """One question to the server tells whether it is there, is the one that is meant, has our
    time and version, and knows us."""
    host, port = host_and_port(address)
    context = ssl.create_default_context(cafile=str(own.folder / AUTHORITY))
    key = fingerprint(public_key(x509.load_pem_x509_certificate(own.certificate)))
    asked = HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
    try:
        asked.request("GET", f"{ADMITTED}{url_quote(key)}")
        answer = asked.getresponse()
        told, date = json.loads(answer.read(2**16)), answer.headers["Date"]
    except ssl.SSLCertVerificationError as error:
        why = f"shows a certificate that is not this federation's ({error.verify_message})"
        yield Finding("server", error=f"{address}: {why}; is it the address in the file?")
        return
    except (OSError, HTTPException, ValueError) as error:
        why = f"does not answer ({error}); is collapipe deploy serve running, the port open?"
        yield Finding("server", error=f"{address}: {why}", bars=False)
        return
    finally:
        asked.close()
    yield Finding("server", address)
    off_s = (datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds()
    late = f"{off_s:.0f} s from the server's; set it, {_CLOCKS_DIFFER_S:.0f} s are refused"
    off_s = abs(off_s)
    wrong, bars = off_s > _CLOCKS_DIFFER_S / 2, off_s > _CLOCKS_DIFFER_S
    yield Finding("clock", f"{off_s:.0f} s from the server's", late if wrong else None, bars)
    here, there = f"collapipe {__version__}", f"collapipe {told['collapipe']}"
    both = f"{here}, flwr {version('flwr')}", f"{there}, flwr {told['flwr']}"
    differ = f"here is {both[0]}, there {both[1]}; install the same"
    yield Finding("version", both[0], differ if both[0] != both[1] else None, bars=False)
    if told["admitted"] is None:
        yield Finding("key", error="the server starts and admits units; try again", bars=False)
        return
    unknown = "the server does not know the unit's key; has it signed the request, is it serving?"
    admitted = bool(told["admitted"])
    yield Finding("key", "admitted", None if admitted else unknown, refused=not admitted)


def _link_port(port: int) -> Finding:
    """Which the server's apps listen on while a run trains."""
    try:
        with socket.create_server(("", port)):
            return Finding(f"port {port}", "free for activations")
    except OSError:
        return Finding(f"port {port}", "in use, as it is while a run trains; see link_port")


def _resolved(host: str) -> Finding:
    try:
        return Finding("host", f"{host} is {socket.getaddrinfo(host, None)[0][4][0]}")
    except OSError as error:
        return Finding("host", error=f"{host}: {error.strerror}; correct host in server.yaml")


def superlink(folder: ServerFolder) -> Finding:
    """Whether that of the folder answers on this machine."""
    port = folder.settings().port
    context = ssl.create_default_context(cafile=str(folder.trusted))
    try:
        with (
            socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost"),
        ):
            return Finding(f"port {port}", "the SuperLink answers")
    except OSError as error:
        way_out = f"collapipe deploy serve {quote(str(folder.root))}"
        return Finding(f"port {port}", error=f"no SuperLink of this folder ({error}); {way_out}")


def findings(path: Path) -> Iterator[Finding]:
    """The findings about a folder of ``deploy init``, or about an owner's file.

    Raises ``ConfigError`` where it is neither.
    """
    if path.is_dir():
        return check_server(ServerFolder(path))
    if not path.exists():
        raise ConfigError(f"{path}: is not there; give a server's folder or an owner's unit.yaml")
    return check_unit(path)
