"""``collapipe unit``: take part in a deployed federation with the owner's rows."""

import fcntl
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NoReturn

from prometheus_client import start_http_server

from collapipe.credentials.bundle import AUTHORITY
from collapipe.credentials.credentials import Credentials
from collapipe.credentials.keys import openssh
from collapipe.deployment.checking import CLOCKS_DIFFER, check_unit, read_unit
from collapipe.errors import CollaPipeError, ConfigError, LinkError, RefusedUnitError, one_line
from collapipe.flower.commands import Flower, free_port, wait_until_open, why_it_ended
from collapipe.owner import account_of
from collapipe.owner_account import KEPT
from collapipe.owner_file import OwnerSection
from collapipe.process import files
from collapipe.process.children import DIRECT, own_environment
from collapipe.process.folders import TemporaryFolder

_log = logging.getLogger(__name__)
_SECRETS = "key", "secret"
_PAUSE_S = 2.0  # before the server is dialled again
_ADMISSION_S = 10.0  # in which the server admits a newly signed certificate
_LOOK_S = 0.5  # between checks of the SuperNode and the replying thread
_IDLE_S = 10.0  # after which an idle connection to the metrics ends: it keeps a thread and a file
_LOCK = ".lock"  # suffix of the lock file, next to the folder of kept state


def run_unit(file: Path, metrics_port: int | None) -> None:
    """Reply to the server's messages until an interrupt; serve metrics for Prometheus locally.

    Raises ``ConfigError`` if the file lacks an entry. Raises ``LinkError`` with the finding of
    ``deploy check`` if something else keeps the unit out, and ``RefusedUnitError`` if the server
    has not admitted it.
    """
    os.environ.update(own_environment(os.environ))  # the SuperNode runs on this machine
    file = file.resolve()
    owner, own = read_unit(file)
    kept = file.parent / KEPT / str(owner.name)  # a restarted process continues from it
    files.make_folder(kept)
    lock = _locked(kept.with_name(kept.name + _LOCK), str(owner.name))
    if (account := account_of({"owner": str(file)})) is not None:
        print(f"{owner.name}: {account.summary()}", flush=True)
    if metrics_port is not None:
        _serve_metrics(metrics_port)
    try:
        _take_part(file, owner, own, kept)
    except KeyboardInterrupt:
        print(f"{owner.name}: has left", flush=True)
        lock.close()
        os._exit(0)  # a normal exit would end threads inside torch, which aborts


def _locked(file: Path, name: str) -> IO[bytes]:
    """Lock a file until the process ends. Raises ``LinkError`` if another process uses this key."""
    lock = file.open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LinkError(
            f"{name}: this key is in use: another collapipe unit of it runs on this machine; end "
            "that one first"
        ) from error
    return lock


def _serve_metrics(port: int) -> None:
    try:
        server, _ = start_http_server(port, "127.0.0.1")
    except OSError as error:
        raise ConfigError(f"--metrics-port {port}: {error.strerror}; choose another") from error
    server.RequestHandlerClass.timeout = _IDLE_S  # type: ignore[attr-defined]
    server.handle_error = _note_broken  # type: ignore[assignment, method-assign]


def _note_broken(*_: object) -> None:
    """Log why a connection to the metrics broke; the library would print a traceback."""
    _log.info("a connection to --metrics-port: %s", one_line(sys.exc_info()[1]))


def _take_part(file: Path, owner: OwnerSection, own: Credentials, kept: Path) -> NoReturn:
    """Dial again whenever Flower's SuperNode has ended, as it does when the server restarts."""
    port, secret = free_port(), secrets.token_bytes(32)
    answers = _Answers(f"127.0.0.1:{port}", secret, kept)
    while True:
        for each in check_unit(file):
            if each.error and each.bars:
                kind = RefusedUnitError if each.refused else LinkError
                raise kind(f"{owner.name} cannot take part: {each.error_line}")
            if each.error:
                print(f"{owner.name}: {each.error_line}", flush=True)
        why = _dial(file, owner, own, (port, secret), answers)
        print(f"{owner.name}: its SuperNode ended ({why})", flush=True)
        time.sleep(_PAUSE_S)
        owner, own = _read_again(file, str(owner.name))


def _read_again(file: Path, name: str) -> tuple[OwnerSection, Credentials]:
    """Read the unit's file and its credentials; wait while they are invalid or about to expire,
    because they may be renewed."""
    waits = False
    while True:
        try:
            owner, own = read_unit(file)
            if own.expires > datetime.now(UTC) + CLOCKS_DIFFER:
                time.sleep(_ADMISSION_S if waits else 0)
                return owner, own
            problem = f"the certificate expires at {own.expires:%F %T} UTC; renew it"
        except ConfigError as error:
            problem = str(error)
        if not waits:
            print(f"{name}: waits for valid credentials: {problem}", flush=True)
        waits = True
        time.sleep(_PAUSE_S)


def _dial(
    file: Path, owner: OwnerSection, own: Credentials, api: tuple[int, bytes], answers: "_Answers"
) -> str:
    """Run a SuperNode until it ends, and return its last line of output.

    ``api`` has the port and secret of its Runtime API, which ``answers`` uses. Raises
    ``CollaPipeError`` if the thread of ``answers`` has ended.
    """
    with TemporaryFolder("unit") as home:
        flower, log = Flower.at(home, DIRECT), home / "supernode.log"
        command = _supernode(home, file, owner, own, *api)
        with log.open("wb") as words, flower.process(command, words, words) as process:
            try:
                wait_until_open(process, api[0], log)
                for name in _SECRETS:  # already read; they must not outlive a killed process
                    (home / name).unlink()
                print(f"{owner.name}: dials {owner.server}", flush=True)
                answers.start()
                answers.wait(process)
            finally:
                process.terminate()
                process.wait()
        return why_it_ended(log.read_text(errors="replace"))


def _supernode(
    home: Path, file: Path, owner: OwnerSection, own: Credentials, port: int, secret: bytes
) -> list[str]:
    """Write the ``_SECRETS`` to ``home``, and return the SuperNode's command, which reads them."""
    key_file, secret_file = (home / name for name in _SECRETS)
    files.write_new(key_file, openssh(own.key), files.PRIVATE)
    files.write_new(secret_file, secret, files.PRIVATE)
    node = f"partition-id={owner.number} owner={json.dumps(str(file))}"
    command = [sys.executable, "-P", "-m", "collapipe.flower.supernode", str(os.getpid())]
    command += ["--superlink", str(owner.server), "--node-config", node]
    command += ["--root-certificates", str(own.folder / AUTHORITY)]
    command += ["--auth-supernode-private-key", str(key_file), "--isolation", "process"]
    command += ["--superexec-auth-secret-file", str(secret_file)]
    return [*command, "--host", "127.0.0.1", "--port", str(port)]


class _Answers:
    """A thread that replies to messages of the SuperNode with this Runtime API."""

    def __init__(self, address: str, secret: bytes, kept: Path) -> None:
        self._api, self._kept = (address, secret), kept
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._ended: BaseException | None = None

    def start(self) -> None:
        """Start the thread, unless it has been started already."""
        if self._thread.ident is None:
            self._thread.start()

    def wait(self, process: "subprocess.Popen[bytes]") -> None:
        """Block until the SuperNode ends. Raises ``CollaPipeError`` if the thread has ended."""
        while process.poll() is None:
            self._thread.join(_LOOK_S)
            if not self._thread.is_alive():
                why = one_line(self._ended)
                raise CollaPipeError(f"the unit cannot answer any more: {why}") from self._ended

    def _answer(self) -> None:
        try:
            # Imported here, because it takes seconds, during which the SuperNode starts.
            from client_app.answering import answer_messages
            from client_app.app import app
            from client_app.kept_store import KeptStore
            from collapipe.flower.runtime import Tasks
            from collapipe.models.cost import get_ready

            get_ready()
            logging.getLogger("client_app").setLevel(logging.INFO)
            logging.getLogger("flwr").setLevel(logging.ERROR)  # it warns when its SuperNode ends
            answer_messages(Tasks(*self._api), KeptStore(self._kept), app)
        except BaseException as error:  # Flower may raise SystemExit
            self._ended = error
