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
from collapipe.errors import ConfigError, RoundFailedError
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
            nodes = _Nodes(folder)
            while process.poll() is None:
                nodes.settle(admissible(AuthorityFolder(folder.authority)))
                time.sleep(_LOOK_S)
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


class _Nodes:
    """Units that are registered with the SuperLink. A file maps their keys' fingerprints to
    Flower's node numbers, because Flower lists nodes without names."""

    def __init__(self, folder: ServerFolder) -> None:
        self._folder, self._file = folder, folder.flower_home / NODES
        self._known: dict[str, str] = {}
        self._units: Mapping[str, Bundle] = {}

    def settle(self, units: Mapping[str, Bundle]) -> None:
        """Register these units, unregister all others, and print the changes."""
        new, revoked = units.keys() - self._known.keys(), self._known.keys() - units.keys()
        for key in new:
            self._known[key] = self._register(units[key])
        for key in revoked:
            ask(self._folder, "unregister-node", {"node_id": self._known.pop(key)})
        if new or revoked or not self._file.exists():
            files.replace(self._file, json.dumps(self._known).encode())
        for name in sorted(units[key].member.name for key in new):
            print(f"unit {name} admitted", flush=True)
        for name in sorted(self._units[key].member.name for key in revoked):
            print(f"unit {name} revoked", flush=True)
        self._units = units

    def _register(self, unit: Bundle) -> str:
        key = b64encode(public_key(unit.certificate).public_bytes(Encoding.PEM, _PUBLIC)).decode()
        question = {"public_key": key, "name": unit.member.name}
        return str(ask(self._folder, "register-node", question)["node_id"])
