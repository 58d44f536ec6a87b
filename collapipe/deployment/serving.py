"""Run a deployed federation's server: its SuperLink, and the admission of units."""

import json
import os
import socket
import sys
import time
from base64 import b64encode
from collections.abc import Mapping

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.bundle import Bundle
from collapipe.credentials.keys import fingerprint, public_key
from collapipe.credentials.member import Role
from collapipe.deployment.control import ask
from collapipe.deployment.server_folder import NODES, SERVER_FOLDER, ServerFolder
from collapipe.errors import CollaPipeError, ConfigError, RoundFailedError
from collapipe.flower.commands import Flower, wait_until_open
from collapipe.process import files

_PUBLIC = PublicFormat.SubjectPublicKeyInfo
_LOOK_S = 2.0  # between checks for newly signed or revoked certificates


def serve(folder: ServerFolder, superlink: str) -> None:
    """Run the module ``superlink`` until an interrupt, and admit units with a valid certificate.

    Raises ``ConfigError`` if the folder is not a server's, and ``CollaPipeError`` if the SuperLink
    ends.
    """
    settings, home = folder.settings(), folder.flower_home
    AuthorityFolder(folder.authority)  # raises an error if it is invalid
    folder.identity()  # as above
    _check_free(settings.port, folder)
    (home / NODES).unlink(missing_ok=True)  # of an earlier SuperLink, which left nothing else
    folder.forget_questions()
    flower = Flower.at(home, {SERVER_FOLDER: str(folder.root)})
    command = [sys.executable, "-P", "-m", superlink, str(os.getpid())]
    command += ["--enable-supernode-auth"]
    command += ["--ssl-ca-certfile", str(folder.trusted), "--ssl-certfile", str(folder.certificate)]
    command += ["--ssl-keyfile", str(folder.key), "--host", "0.0.0.0", "--port"]  # noqa: S104 - meant to
    command += [str(settings.port)]
    log = home / "superlink.log"
    with log.open("wb") as words, flower.process(command, words, words) as process:
        try:
            wait_until_open(process, settings.port, log)
            print(f"ready on port {settings.port}; units: {', '.join(settings.units)}", flush=True)
            nodes = Nodes(folder)
            nodes.settle()
            while process.poll() is None:
                time.sleep(_LOOK_S)
                nodes.look()
        except KeyboardInterrupt:
            print("has ended", flush=True)
            return
        finally:
            process.terminate()
            process.wait()
    raise RoundFailedError(f"the SuperLink ended with status {process.returncode}; {log} says why")


def _check_free(port: int, folder: ServerFolder) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ConfigError(
            f"port {port}: cannot be opened ({error.strerror}); end what listens there, or change "
            f"port in {folder.root / 'server.yaml'} and in each owner's unit.yaml"
        ) from error


def admissible(authority: AuthorityFolder) -> dict[str, Bundle]:
    """Return the units with valid certificates, by fingerprint of their keys.

    A renewed unit has two certificates of one key.
    """
    valid = [each for each in authority.issued() if authority.state(each) == "valid"]
    units = [each for each in valid if each.member.role == Role.UNIT]
    return {fingerprint(public_key(each.certificate)): each for each in units}


def keys(folder: ServerFolder) -> dict[str, str]:
    """Return unit name → fingerprint of the unit's key."""
    units = admissible(AuthorityFolder(folder.authority))
    return {unit.member.name: key for key, unit in units.items()}


def signed_names(folder: ServerFolder) -> dict[int, str]:
    """Return Flower's node number → unit name, of the registered units."""
    nodes = folder.nodes() or {}
    return {int(nodes[key]): name for name, key in keys(folder).items() if key in nodes}


class Nodes:
    """The admitted units. A file maps their keys' fingerprints to Flower's node numbers, because
    Flower lists nodes without names; requests of other keys are refused.

    A key stays registered with the SuperLink when its certificate expires: Flower never registers a
    key twice, and the certificate may be renewed.
    """

    def __init__(self, folder: ServerFolder) -> None:
        self._folder, self._file = folder, folder.flower_home / NODES
        self._numbers: dict[str, str] = {}  # fingerprint → node number of all registered keys
        self._units: Mapping[str, Bundle] = {}  # admitted
        self._problem = ""

    def look(self) -> None:
        """Settle again. A problem is printed once, and changes no unit's admission."""
        problem = ""
        try:
            self.settle()
        except CollaPipeError as error:
            problem = str(error)
        if problem not in ("", self._problem):
            print(f"warning: {problem}; until then no unit is admitted or left out", flush=True)
        self._problem = problem

    def settle(self) -> None:
        """Admit all units with a valid certificate and no others, and print the changes."""
        authority = AuthorityFolder(self._folder.authority)
        units, before = admissible(authority), self._units
        new, left_out = units.keys() - before.keys(), before.keys() - units.keys()
        revoked = {key for key in left_out if authority.state(before[key]) == "revoked"}
        for key in new - self._numbers.keys():
            self._numbers[key] = self._register(units[key])
        if new or left_out or not self._file.exists():
            admitted = {key: self._numbers[key] for key in units}
            files.replace(self._file, json.dumps(admitted).encode())
        self._units = units
        for key in revoked:
            ask(self._folder, "unregister-node", {"node_id": self._numbers.pop(key)})
        for name in sorted(units[key].member.name for key in new):
            print(f"unit {name} admitted", flush=True)
        for name in sorted(before[key].member.name for key in revoked):
            print(f"unit {name} revoked", flush=True)
        for name in sorted(before[key].member.name for key in left_out - revoked):
            print(
                f"unit {name} left out: its certificate has expired; sign its renewal", flush=True
            )

    def _register(self, unit: Bundle) -> str:
        key = b64encode(public_key(unit.certificate).public_bytes(Encoding.PEM, _PUBLIC)).decode()
        question = {"public_key": key, "name": unit.member.name}
        return str(ask(self._folder, "register-node", question)["node_id"])
