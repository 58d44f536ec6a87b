"""``collapipe`` on an executed page: asks ``forked_commands.py`` to run the command.

A command that serves stays in the background once it is ready. ``$SERVED`` holds its log and the
process id of the client that waits for it; terminating the client ends the command. This file
imports little because it runs often.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

READY = {  # what commands that serve print when they are ready
    "deploy serve": "ready on port",
    "unit unit.yaml": " dials ",
    "device --listen": ": ready on ",
    "up --devices": "Ctrl-C ends",
}


def ask() -> int:
    """Run the command, and return its exit status."""
    request = json.dumps([sys.argv[1:], dict(os.environ), str(Path.cwd())]).encode()
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(os.environ["FORKS"])
        socket.send_fds(there, [len(request).to_bytes(4, "big")], [0, 1, 2])
        there.sendall(request)
        signal.signal(signal.SIGTERM, lambda *_: there.send(b"e"))
        return int.from_bytes(there.recv(1) or b"\1", "big")


def serve(ready: str) -> int:
    """Start the command, and return once it is ready or has ended."""
    served = Path(os.environ["SERVED"], str(time.time_ns()))
    command = [sys.executable, "-SE", *sys.argv]
    with (log := served.with_suffix(".log")).open("wb") as words:
        there = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            env={**os.environ, "BACKGROUND": "1"},
        )
    served.with_suffix(".pid").write_text(str(there.pid))
    while there.poll() is None and ready not in log.read_text():
        time.sleep(0.1)
    print(log.read_text(), end="", flush=True)
    return there.returncode or 0


if __name__ == "__main__":
    words = READY.get(" ".join(sys.argv[1:3]))
    apart = words is not None and "--" not in sys.argv and "BACKGROUND" not in os.environ
    sys.exit(serve(words) if apart and words is not None else ask())
