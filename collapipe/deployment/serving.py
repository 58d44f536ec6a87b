"""A deployed federation's server: its SuperLink, and the units that it knows."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.bundle import Bundle
from collapipe.credentials.keys import public_key
from collapipe.credentials.member import Role
from collapipe.deployment.flower import Flower, wait_until_open
from collapipe.deployment.server_folder import CONNECTION, ServerFolder
from collapipe.errors import CollaPipeError, RoundFailedError

_LOOK_S = 2.0  # between looks whether the authority has signed or revoked anything
_ALREADY = "already"  # in Flower's answer about a key that it knows


def serve(folder: ServerFolder) -> None:
    """Run the SuperLink until an interrupt, and let in whom the authority has signed.

    Raises ``ConfigError`` for a folder that is none, ``CollaPipeError`` where the SuperLink ends.
    """
    settings, home = folder.settings(), folder.flower_home
    AuthorityFolder(folder.authority)  # which says what is wrong with it
    flower = Flower.at(home)
    command = [sys.executable, "-m", "server_app.superlink", "--enable-supernode-auth"]
    command += ["--ssl-ca-certfile", str(folder.trusted), "--ssl-certfile", str(folder.certificate)]
    command += ["--ssl-keyfile", str(folder.key), "--host", "0.0.0.0", "--port"]  # noqa: S104 - meant to
    command += [str(settings.port), "--database", str(home / "superlink.db")]
    log = home / "superlink.log"
    with log.open("wb") as words, flower.process(command, words, words) as process:
        try:
            wait_until_open(process, settings.port, log)
            print(f"ready on port {settings.port}; units: {', '.join(settings.units)}", flush=True)
            _admit_for_good(folder, flower, process)
        finally:
            process.terminate()
            process.wait()
    raise RoundFailedError(f"the SuperLink ended with status {process.returncode}; {log} says why")


def _admit_for_good(folder: ServerFolder, flower: Flower, process: subprocess.Popen[bytes]) -> None:
    """Until the SuperLink ends."""
    known = dict[int, str]()  # serials → names
    while process.poll() is None:
        authority = AuthorityFolder(folder.authority)
        for each in authority.issued():
            member = each.member
            if member.role != Role.UNIT:
                continue
            valid = authority.state(each) == "valid"
            if valid and member.serial not in known:
                known[member.serial] = member.name
                print(f"unit {member.name} may come", flush=True)
                _register(flower, each)
            elif not valid and known.pop(member.serial, None):
                print(f"unit {member.name} may come no more", flush=True)
                _unregister(flower, member.name)
        time.sleep(_LOOK_S)


def _register(flower: Flower, unit: Bundle) -> None:
    key = public_key(unit.certificate).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "key.pub"
        file.write_bytes(key)
        try:
            flower.ask("supernode", "register", str(file), CONNECTION, "--name", unit.member.name)
        except CollaPipeError as error:
            if _ALREADY not in str(error):
                raise


def _unregister(flower: Flower, name: str) -> None:
    for node in flower.ask("supernode", "list", CONNECTION)["nodes"]:
        if node.get("name") == name:
            flower.ask("supernode", "unregister", str(node["node-id"]), CONNECTION)
