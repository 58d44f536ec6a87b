"""Check a deployed federation's server or unit for problems before a run fails because of them."""

import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from urllib.parse import quote as url_quote

from cryptography import x509

from collapipe import __version__
from collapipe.credentials.addresses import host_and_port
from collapipe.credentials.bundle import AUTHORITY
from collapipe.credentials.credentials import Credentials, load
from collapipe.credentials.keys import fingerprint, public_key
from collapipe.credentials.member import Role, expires_soon
from collapipe.credentials.signing import general_name
from collapipe.deployment.control import ask
from collapipe.deployment.server_folder import ADMITTED, ServerFolder
from collapipe.deployment.serving import keys
from collapipe.errors import CollaPipeError, ConfigError, LinkError, faults_of
from collapipe.owner_file import OwnerSection, read_owner

_TIMEOUT_S = 8.0
CLOCKS_DIFFER = timedelta(seconds=300)  # with a larger difference Flower refuses a node's signature


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check, or its ``error`` and the ``way_out``.

    An error that ``bars`` the unit keeps it out of runs; others do not, or end without a change
    here. ``refused`` means that the server must admit the unit first.
    """

    what: str
    found: str = ""
    error: str | None = None
    way_out: str = ""
    bars: bool = True
    refused: bool = False

    @classmethod
    def of(cls, what: str, error: CollaPipeError, correct: str) -> "Finding":
        """Split an ``error`` into problem and way out; the default way out is to ``correct`` it."""
        problem, _, way_out = str(error).rpartition("; ")
        if not problem:
            problem, way_out = way_out, f"correct {correct}"
        return cls(what, error=problem, way_out=way_out)

    @property
    def error_line(self) -> str:
        """The error with its way out, on one line."""
        return f"{self.what}: {self.error}; {self.way_out}"


def read_unit(file: Path) -> tuple[OwnerSection, Credentials]:
    """Return the contents of a deployed unit's file, and the unit's credentials.

    Raises ``ConfigError`` if the file lacks a key, or the credentials do not fit it.
    """
    owner = read_owner(file)
    for key in ("name", "number", "server", "credentials"):
        if getattr(owner, key) is None:
            raise ConfigError(f"{file}: {key} is missing; collapipe deploy init writes it")
    with faults_of(f"{file}: server"):
        host_and_port(str(owner.server))
    own = load(file.parent / str(owner.credentials))
    if (own.member.name, own.member.role) != (owner.name, Role.UNIT):
        raise ConfigError(
            f"{own.folder}: has the certificate of {own.member}, the file is of unit {owner.name}; "
            "sign its request with --role unit"
        )
    return owner, own


def check_unit(file: Path) -> Iterator[Finding]:
    """Check an owner's file: its credentials, its rows and its server.

    Raises ``ConfigError`` if the file or the credentials cannot be read.
    """
    owner, own = read_unit(file)
    yield _expiry(own.expires, "renew it: docs/how-to/credentials.md")
    yield _rows(file, owner)
    yield from _server(str(owner.server), own)


def check_server(folder: ServerFolder) -> Iterator[Finding]:
    """Check a server's folder: its certificate, its ports and its units.

    Raises ``ConfigError`` if the folder is not a server's.
    """
    settings = folder.settings()
    issued = x509.load_pem_x509_certificate(folder.identity()[1])
    renew = f"collapipe deploy renew {quote(str(folder.root))}, and serve again"
    yield _expiry(issued.not_valid_after_utc, renew)
    yield _link_port(settings.link_port)
    yield _certified(settings.host, issued, renew)
    yield _superlink(folder)
    known, signed = folder.nodes() or {}, keys(folder)
    for unit in settings.units:
        if unit not in signed:
            sign = f"collapipe credentials sign {quote(str(folder.authority))} request.pem"
            yield Finding(f"unit {unit}", error="has no valid certificate", way_out=sign)
        elif signed[unit] in known:
            yield Finding(f"unit {unit}", "admitted")
        else:
            serve = f"collapipe deploy serve {quote(str(folder.root))}"
            yield Finding(f"unit {unit}", error="is not admitted yet", way_out=serve)


def _expiry(expires: datetime, renew: str) -> Finding:
    if expires_soon(expires):
        ended = expires < datetime.now(UTC)
        return Finding("certificate", error=f"ends on {expires:%F}", way_out=renew, bars=ended)
    return Finding("certificate", f"valid until {expires:%F}")


def _rows(file: Path, owner: OwnerSection) -> Finding:
    data = owner.data
    if data.name is not None:
        return Finding("rows", f"{data.name}, from the hub")
    path = file.parent / str(data.train_file or data.root)
    if not path.exists():
        return Finding("rows", error=f"{path}: is not there", way_out=f"correct data in {file}")
    return Finding("rows", str(path))


def _server(address: str, own: Credentials) -> Iterator[Finding]:
    """Check a server with one request: its address, certificate, clock and version, and our key."""
    host, port = host_and_port(address)
    context = ssl.create_default_context(cafile=str(own.folder / AUTHORITY))
    key = fingerprint(public_key(x509.load_pem_x509_certificate(own.certificate)))
    connection = HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
    try:
        connection.request("GET", f"{ADMITTED}{url_quote(key)}")
        answer = connection.getresponse()
        status, date = json.loads(answer.read(2**16)), answer.headers["Date"]
    except ssl.SSLCertVerificationError as error:
        why = f"shows a certificate that is not this federation's ({error.verify_message})"
        yield Finding(
            "server", error=f"{address}: {why}", way_out="correct server in the file, or the clocks"
        )
        return
    except (OSError, HTTPException, ValueError) as error:
        serve = "start collapipe deploy serve there, open its port, or correct server in the file"
        why = f"{address}: does not answer ({error})"
        yield Finding("server", error=why, way_out=serve, bars=False)
        return
    finally:
        connection.close()
    yield Finding("server", address)
    off, most_s = abs(datetime.now(UTC) - parsedate_to_datetime(date)), CLOCKS_DIFFER.seconds
    clock = f"{off.total_seconds():.0f} s from the server's, {most_s} s are allowed"
    yield Finding("clock", clock, clock if off > CLOCKS_DIFFER else None, "set the clock")
    here, there = f"collapipe {__version__}", f"collapipe {status['collapipe']}"
    both = f"{here}, flwr {version('flwr')}", f"{there}, flwr {status['flwr']}"
    differ = f"here is {both[0]}, there {both[1]}" if both[0] != both[1] else None
    yield Finding("version", both[0], differ, "install the same", bars=False)
    if status["admitted"] is None:
        starting = "the server starts and admits units"
        yield Finding("key", error=starting, way_out="try again", bars=False)
        return
    unknown = None if status["admitted"] else "the server does not know the unit's key"
    sign = "have the request signed there, and deploy serve running"
    yield Finding("key", "admitted", unknown, sign, refused=unknown is not None)


def _link_port(port: int) -> Finding:
    """Check the port on which the server's apps listen while a run trains."""
    try:
        with socket.create_server(("", port)):
            return Finding(f"port {port}", "free for activations")
    except OSError:
        return Finding(f"port {port}", "in use, as it is while a run trains; see link_port")


def _certified(host: str, issued: x509.Certificate, renew: str) -> Finding:
    """Check that the server's certificate names its host, and that the host is known."""
    names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if general_name(host) not in names:
        known = ", ".join(str(each.value) for each in names)
        return Finding("host", error=f"{host}: the certificate names {known}", way_out=renew)
    try:
        return Finding("host", f"{host} is {socket.getaddrinfo(host, None)[0][4][0]}")
    except OSError as error:
        why, way_out = f"{host}: {error.strerror}", "correct host in server.yaml"
        return Finding("host", error=why, way_out=way_out)


def _superlink(folder: ServerFolder) -> Finding:
    """Check that the folder's SuperLink answers on this machine."""
    what = f"port {folder.settings().port}"
    try:
        ask(folder, "list-runs", {})
    except LinkError as error:
        return Finding.of(what, error, "server.yaml")
    return Finding(what, "the SuperLink answers")


def findings(path: Path) -> Iterator[Finding]:
    """Check a folder of ``deploy init`` or an owner's file, whichever ``path`` is.

    Raises ``ConfigError`` if ``path`` is missing or invalid.
    """
    if path.is_dir():
        return check_server(ServerFolder(path))
    if not path.exists():
        raise ConfigError(f"{path}: is not there; give a server's folder or an owner's unit.yaml")
    return check_unit(path)
