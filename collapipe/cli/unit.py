"""``collapipe unit``: take part in a deployed federation with one's own rows."""

import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from prometheus_client import start_http_server

from collapipe.credentials import files
from collapipe.credentials.bundle import AUTHORITY
from collapipe.credentials.credentials import Credentials
from collapipe.credentials.keys import openssh
from collapipe.deployment.checking import check_unit
from collapipe.deployment.flower import Flower, free_port, last_line, wait_until_open
from collapipe.deployment.unit_file import read_unit
from collapipe.errors import ConfigError, LinkError
from collapipe.owner import OwnerSection

_SECRETS = "key", "secret"
_KEPT = "kept"  # beside the owner's file: what a process that starts anew goes on with


def run_unit(file: Path, metrics_port: int | None) -> None:
    """Answer the server's messages until an interrupt; Prometheus may ask on this machine.

    Raises ``ConfigError`` for a file that does not say all that a deployed unit needs, and
    ``LinkError`` where Flower's SuperNode ends, as it does where the server refuses its key, with
    what ``deploy check`` finds wrong.
    """
    file = file.resolve()
    owner, own = read_unit(file)
    kept = file.parent / _KEPT / str(owner.name)
    files.make_folder(kept)
    if metrics_port is not None:
        _serve_metrics(metrics_port)
    try:
        why = _take_part(file, owner, own, kept)
    except KeyboardInterrupt:
        print(f"{owner.name}: has left", flush=True)
        os._exit(0)  # the interpreter's own end tears threads out of torch, which aborts
    again = f"its SuperNode ended, as it does when the server starts anew; start it again ({why})"
    wrong = next((f"{each.what}: {each.error}" for each in check_unit(file) if each.error), again)
    raise LinkError(f"{owner.name} takes no part: {wrong}")


def _serve_metrics(port: int) -> None:
    try:
        start_http_server(port, "127.0.0.1")
    except OSError as error:
        raise ConfigError(f"--metrics-port {port}: {error.strerror}; choose another") from error


def _take_part(file: Path, owner: OwnerSection, own: Credentials, kept: Path) -> str:
    """Until the SuperNode ends; its last words."""
    with tempfile.TemporaryDirectory(prefix="collapipe-unit-") as home:
        flower = Flower.at(Path(home))
        port, secret, log = free_port(), secrets.token_bytes(32), Path(home) / "supernode.log"
        command = _supernode(Path(home), file, owner, own, port, secret)
        with log.open("wb") as words, flower.process(command, words, words) as process:
            try:
                wait_until_open(process, port, log)
                for name in _SECRETS:  # which it has read, and would stay if we were killed
                    (Path(home) / name).unlink()
                print(f"{owner.name}: dials {owner.server}", flush=True)
                _serve(f"127.0.0.1:{port}", secret, process, kept)
            finally:
                process.terminate()
                process.wait()
        return last_line(log.read_text(errors="replace").partition("INFO:     Shutting")[0])


def _supernode(
    home: Path, file: Path, owner: OwnerSection, own: Credentials, port: int, secret: bytes
) -> list[str]:
    """Its command, which reads the ``_SECRETS`` in ``home``; the key is in Flower's form."""
    key_file, secret_file = (home / name for name in _SECRETS)
    files.write_new(key_file, openssh(own.key), files.PRIVATE)
    files.write_new(secret_file, secret, files.PRIVATE)
    node = f"partition-id={owner.number} owner={json.dumps(str(file))}"
    command = [sys.executable, "-m", "client_app.supernode_process", str(os.getpid())]
    command += ["--superlink", str(owner.server), "--node-config", node]
    command += ["--root-certificates", str(own.folder / AUTHORITY)]
    command += ["--auth-supernode-private-key", str(key_file), "--isolation", "process"]
    command += ["--superexec-auth-secret-file", str(secret_file)]
    return [*command, "--host", "127.0.0.1", "--port", str(port)]


def _serve(address: str, secret: bytes, process: subprocess.Popen[bytes], kept: Path) -> None:
    """Answer messages until the SuperNode ends."""
    # Imported here: they take seconds, in which the SuperNode has started.
    from client_app.app import app
    from client_app.kept_store import KeptStore
    from client_app.supernode import Messages

    logging.getLogger("client_app").setLevel(logging.INFO)
    logging.getLogger("flwr").setLevel(logging.ERROR)  # it warns of its own SuperNode's end
    messages = Messages(address, secret, KeptStore(kept))
    work = threading.Thread(target=messages.answer, args=(app,), daemon=True)
    work.start()
    process.wait()
