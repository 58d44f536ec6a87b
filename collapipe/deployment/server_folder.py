"""The folder of a deployed federation's server: its contents, and how it is made."""

import json
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files as resources
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from string import Template
from typing import Annotated

from cryptography import x509
from pydantic import Field

from collapipe.credentials import authority
from collapipe.credentials.addresses import host_and_port
from collapipe.credentials.bundle import read_certificate
from collapipe.credentials.keys import reading
from collapipe.credentials.member import check_name
from collapipe.deployment import LINK_PORT, PORT
from collapipe.errors import ConfigError, StorageError, cause_of, is_printable
from collapipe.inventory.values import Section, Text
from collapipe.inventory.yaml_file import load
from collapipe.process import files
from collapipe.process.folders import in_home
from collapipe.sections import address

CONNECTION = "collapipe"  # name of the SuperLink for Flower's commands
_CONFIG = "config.toml"  # of Flower, below FLWR_HOME
NODES = "nodes.json"  # below FLWR_HOME: fingerprint of a unit's key → Flower's node number
ADMITTED = "/collapipe/admitted/"  # path that reports whether the unit with a key is admitted
EXPECTED = ".replies"  # suffix of a run's note about the sizes of replies
RUNS = "/collapipe/runs/"  # path for downloads of the folders of ended runs
CONTROL = "/collapipe/control/"  # path of Flower's Control API in JSON
SERVER_FOLDER = "COLLAPIPE_SERVER_FOLDER"  # environment variable of a run: its server's folder
_LOCAL = "localhost", "127.0.0.1"
_TEMPLATES = resources("collapipe.deployment") / "templates"
Port = Annotated[int, Field(ge=1, le=65535)]


class ServerSection(Section):
    """The contents of ``server.yaml``."""

    host: Text
    port: Port = PORT
    link_port: Port = LINK_PORT
    units: Annotated[list[Text], Field(min_length=1)]

    def options(self) -> list[str]:
        """Return a run's options for the number of units and the address of the decoder link."""
        from collapipe.config.overrides import setting  # imports Hydra

        return [
            setting("federation.num_units", len(self.units)),
            "link.host=0.0.0.0",
            setting("link.port", self.link_port),
            setting("link.advertise", address(self.host, self.link_port)),
        ]


class ServerFolder:
    """Paths of the files below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # folder of the authority, which signs units' requests; it can admit any unit
        self.authority = root / "authority"
        self.trusted = self.authority / "authority.crt"  # the authority's certificate
        self.key = root / "server" / "server.key"  # the server's private key
        self.certificate = root / "server" / "server.crt"  # with the names of its host
        # FLWR_HOME: the connection for submitting runs, and the SuperLink's records
        self.flower_home = root / "server" / "flower"
        self.metrics = self.flower_home / "metrics.prom"  # the last round's figures, for Prometheus
        self._notes = self.flower_home / "runs"

    def identity(self) -> tuple[bytes, bytes]:
        """Return the server's key and its certificate, both PEM.

        Raises ``ConfigError`` if one cannot be read, if others can read the key, or if they do not
        belong together and to the authority.
        """
        both = f"restore both, or collapipe deploy renew {shlex.quote(str(self.root))}"
        key = files.read(self.key, both, private=True)
        certificate = files.read(self.certificate, both)
        try:
            SSLContext(PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except OSError as error:  # OpenSSL's
            raise ConfigError(
                f"{self.key}: is not of {self.certificate.name} ({cause_of(error)}); {both}"
            ) from error
        trusted = read_certificate(self.trusted, "restore it")
        with reading(self.certificate, f"is not signed by {self.trusted}; {both}"):
            x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(trusted)
        return key, certificate

    def renew(self) -> None:
        """Make the server's key and certificate anew, for the host in ``server.yaml``."""
        opened, hosts = authority.AuthorityFolder(self.authority), [self.settings().host, *_LOCAL]
        opened.add_server(hosts, self.key, self.certificate)

    def update_connection(self) -> None:
        """Write Flower's connection for submitting runs anew: the folder may have moved, or the
        port in ``server.yaml`` may have changed."""
        own = _connection(self.settings().port, self.trusted.resolve().as_posix())
        file = self.flower_home / _CONFIG
        if not file.is_file() or file.read_bytes() != own:
            files.replace(file, own)

    def note_run(self, number: str, run_dir: Path) -> None:
        """Store the path of the folder of the run with Flower's ``number``."""
        files.make_folder(self._notes)
        write_in_run(self._note(number), bytes(run_dir.resolve()))

    def run_dir(self, number: str) -> Path | None:
        """Return the path that ``note_run`` stored; None if it stored none."""
        note = self._note(number)
        return Path(os.fsdecode(note.read_bytes())) if note.exists() else None

    def expect_replies(self, number: str, question: int, most_bytes: int) -> None:
        """Store the size of the largest reply that the run with Flower's ``number`` expects so far.

        ``question`` is the number of the run's last request.
        """
        write_in_run(self._note(number).with_suffix(EXPECTED), b"%d %d" % (question, most_bytes))

    def expected_replies(self) -> dict[str, tuple[int, int]]:
        """Return, by run, the number of the last request and the largest reply so far in bytes."""
        found = dict[str, tuple[int, int]]()
        for file in sorted(self._notes.glob(f"*{EXPECTED}")):
            with suppress(FileNotFoundError):  # another process has just removed the file
                question, most_bytes = file.read_bytes().split()
                found[file.stem] = int(question), int(most_bytes)
        return found

    def forget_questions(self, number: str = "*") -> None:
        """Remove the notes of ``expect_replies`` for a run that is over, or for all runs."""
        for file in self._notes.glob(f"{number}{EXPECTED}"):
            file.unlink(missing_ok=True)

    def _note(self, number: str) -> Path:
        return self._notes / f"{int(number)}"

    def nodes(self) -> dict[str, str] | None:
        """Return the contents of ``NODES``; None while the server starts."""
        file = self.flower_home / NODES
        return dict(json.loads(file.read_text())) if file.exists() else None

    def settings(self) -> ServerSection:
        """Read ``server.yaml``. Raises ``ConfigError`` if it is missing or invalid."""
        file = self.root / "server.yaml"
        if not file.exists():
            raise ConfigError(
                f"{self.root}: has no server.yaml; collapipe deploy init makes such a folder"
            )
        return load(file).parse(ServerSection)


def own_folder() -> ServerFolder | None:
    """Return the server folder of this app's process; None outside ``deploy serve``."""
    named = os.environ.get(SERVER_FOLDER)
    return ServerFolder(Path(named)) if named else None


def with_folder(overrides: Sequence[str]) -> list[str]:
    """Put the options of the server folder in ``runtime.federation`` before the overrides.

    Raises ``ConfigError`` if that folder was not made by ``create``.
    """
    from collapipe.config.overrides import parse, setting  # imports Hydra

    named = [
        in_home(str(e.value())) for e in parse(overrides) if e.key_or_group == "runtime.federation"
    ]
    if not named or not Path(named[-1]).is_dir():  # else a name in Flower's configuration
        return [*overrides]
    folder = Path(named[-1]).resolve()
    own = ServerFolder(folder).settings().options()
    return [*own, *overrides, setting("runtime.federation", folder)]


def write_in_run(file: Path, content: bytes) -> None:
    """Replace a file of the server's folder during a run. Raises ``StorageError`` if that fails."""
    try:
        with files.replacing(file, files.PUBLIC) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise StorageError(f"{file}: cannot be written ({cause_of(error)}); make room") from error


def create(root: Path, units: list[str], host: str, port: int, link_port: int) -> ServerFolder:
    """Make a folder for the server, and in it a folder for the owner of each of the ``units``.

    Raises ``ConfigError`` for invalid names, or if the folder is not empty.
    """
    from collapipe.config.overrides import typed  # imports Hydra

    if len({check_name(unit) for unit in units}) != len(units):
        raise ConfigError(f"--units {','.join(units)}: names a unit twice; each has its own name")
    server = address(host, port)
    host, _ = host_and_port(server)  # raises an error for an invalid address
    if not is_printable(str(root.resolve())):
        raise ConfigError(f"{root}: its path has control characters, or is not UTF-8; name another")
    with files.new_folder(root) as partial:
        folder = ServerFolder(partial)
        opened = authority.create(folder.authority, control_unit=False)
        files.make_folder(folder.flower_home)
        opened.add_server([host, *_LOCAL], folder.key, folder.certificate)
        there = root.resolve()
        names = {
            "host": host,
            "port": port,
            "link_port": link_port,
            "units": ", ".join(units),
            "server": server,
            "fingerprint": opened.fingerprint,
            "user": f"{os.getuid()}:{os.getgid()}",
            "yaml_host": _quoted(host),
            "yaml_server": _quoted(server),
            "yaml_units": _quoted(units),
            "root": shlex.quote(str(there)),
            "authority": shlex.quote(str(there / "authority")),
            "federation": shlex.quote(typed("runtime.federation", there)),
            "first_run": shlex.quote(typed("hydra.run.dir", there / "runs" / "first")),
            "compose_root": _quoted(str(there).replace("$", "$$")),
            "compose_cache": _quoted(str(there / "cache").replace("$", "$$")),
            "service_root": _systemd(there),
            "service_argument": _systemd(there).replace("$", "$$"),
        }
        for name in ("server.yaml", "README.md", "compose.yaml", "collapipe-server.service"):
            _write(partial, name, names)
        trusted = (root.resolve() / folder.trusted.relative_to(partial)).as_posix()
        files.write_new(folder.flower_home / _CONFIG, _connection(port, trusted))
        for number, unit in enumerate(units):
            own = {**names, "unit": unit, "yaml_unit": _quoted(unit), "number": number}
            files.make_folder(of_owner := partial / "units" / unit)
            for name in ("unit.yaml", "OWNER.md", "collapipe-unit.service"):
                _write(of_owner, name, own)
    return ServerFolder(root)


def _connection(port: int, trusted: str) -> bytes:
    """Return Flower's configuration with the connection to the SuperLink on this machine."""
    options = f'address = "127.0.0.1:{port}"\nroot-certificates = {_quoted(trusted)}\n'
    return f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{options}'.encode()


def _quoted(value: object) -> str:
    """Return a text or a list of texts on one line, as valid YAML and TOML."""
    return json.dumps(value, ensure_ascii=False)


def _systemd(path: Path) -> str:
    """Quote a path for systemd; in commands the caller must also double dollar signs."""
    escaped = re.sub(r'([\\"])', r"\\\1", str(path)).replace("%", "%%")
    return f'"{escaped}"'


def _write(folder: Path, name: str, names: dict[str, object]) -> None:
    text = Template((_TEMPLATES / name).read_text("utf-8")).substitute(names)
    files.write_new(folder / name, text.encode())
