"""Runs ``collapipe`` commands as forks of one process that has imported everything: each fork saves
up to 15 s of a core.

``python forked_commands.py DESCRIPTOR`` serves a listening socket until this process or its parent
ends. The client, ``forked_client.py``, sends arguments, environment, folder and streams, and
receives the command's exit status.
"""

import json
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from runpy import run_path

RUN = ("federation.rounds=1", "federation.local_steps=1", "batch_size=8")
"""Options that make a run cheap."""
ROWS = ("data.max_train_samples=120", "data.max_eval_samples=4")  # if no owner provides rows
SMALL = (
    "model.dim=16",
    "model.num_heads=2",
    "model.num_decoder_blocks=1",
)  # for models with large defaults
_IMPORTED = (
    "collapipe.cli.app",
    "collapipe.cli.resume",
    "collapipe.cli.trained.predict",
    "server_app.app",
    "client_app.app",
    "transformers.models.bert.modeling_bert",
    "flwr_datasets.partitioner",
    "sklearn.metrics",
    "peft",
)
_POLL_S, _END_S = 0.05, 30.0


def cheap(arguments: Sequence[str]) -> list[str]:
    """Return the command with options that make it finish in seconds."""
    command = arguments[arguments.index("--") + 1 :] if "--" in arguments else arguments
    if command[:1] == ["run"]:
        owned = any(each.startswith("runtime=deployment") for each in command)
        trial = arguments[:2] == ["deploy", "trial"]
        small = SMALL if any("multi30k" in each for each in command) else ()
        rounds = f"federation.rounds={os.environ.get('ROUNDS', 1)}"
        return [*arguments, *RUN, *small, rounds, *([] if owned or trial else ROWS)]
    if command[:2] == ["deploy", "init"]:
        return [*arguments, "--port", os.environ["PORT"], "--link-port", os.environ["LINK_PORT"]]
    return [*arguments]


def main() -> None:
    """Fork a process for each command that a client requests."""
    for name in _IMPORTED:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for a command's guard
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        parent = os.getppid()
        while os.getppid() == parent:
            if not select.select([listening], [], [], 1)[0]:
                continue
            client, _ = listening.accept()
            if not os.fork():
                listening.close()
                guard(client)
            client.close()


def guard(client: socket.socket) -> None:
    """Fork once more for the command, and send its status; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(client, 4, 3)
    wanted, request = int.from_bytes(size, "big"), b""
    while len(request) < wanted:
        request += client.recv(wanted - len(request))
    command = os.fork()
    if not command:
        client.close()
        run(*json.loads(request), streams)
    for stream in streams:
        os.close(stream)
    end_requested_s = math.inf
    while not (ended := os.waitpid(command, os.WNOHANG))[0]:
        if time.monotonic() > end_requested_s + _END_S:
            os.killpg(command, signal.SIGKILL)
        elif end_requested_s < math.inf:
            time.sleep(_POLL_S)
        elif select.select([client], [], [], _POLL_S)[0]:
            client.recv(1)  # the client asks for the end or has ended
            end_requested_s = time.monotonic()
            os.kill(command, signal.SIGTERM)
    with suppress(OSError):
        client.sendall(bytes([os.waitstatus_to_exitcode(ended[1]) & 0xFF]))
    os._exit(0)


def run(
    arguments: list[str], environment: dict[str, str], folder: str, streams: Sequence[int]
) -> None:
    """Become the command; never returns."""
    from collapipe.cli.app import main

    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    # Python's own streams record whether the server's streams were seekable.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - they end with the process
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    status = 1
    link_latest()
    try:
        if arguments[0].endswith(".py"):
            run_path(arguments[0], run_name="__main__")
            status = 0
        else:
            sys.argv = ["collapipe", *cheap(arguments)]
            main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def link_latest() -> None:
    """Make ``RUN_DIR`` a link to the latest run in this folder."""
    runs = [each.parent.resolve() for each in Path().glob("outputs/2*/*/config.yaml")]
    if runs:
        Path("RUN_DIR").unlink(missing_ok=True)
        Path("RUN_DIR").symlink_to(max(runs, key=lambda each: each.stat().st_ctime))


if __name__ == "__main__":
    main()
