"""A federation as its owners put it up: a SuperLink and three units with rows and keys of their
own, two of them with devices, as processes on loopback with TLS."""

import json
import os
import shlex
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast
from urllib.error import HTTPError

import psutil
import pytest
import torch
from device_cluster import daemons
from federated import train, weights
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from test_devices import inventory
from test_owners import MODEL, written

from client_app.app import app
from collapipe.cli.run import run_job
from collapipe.config import load_overrides
from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.member import Role
from collapipe.deployment.checking import findings
from collapipe.deployment.flower import free_port
from collapipe.deployment.server_folder import ADMITTED, ServerFolder, create
from server_app.grid import InlineGrid

UNITS = ["berlin", "paris", "rome"]
ROUNDS, LOST = 3, 2  # rome is killed when this round begins, and returns in the next
_GOODBYE_S = 1.0  # for a SuperNode to notice that its unit was killed, or to say that it is there
_GONE = 5  # Flower's code of a node that is not there


class Processes:
    """Commands of ours, each with its lines; all end with the context, and what they started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running = dict[str, subprocess.Popen[str]]()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(20)

    def start(self, name: str, *arguments: object) -> None:
        command = [sys.executable, "-m", "collapipe", *map(str, arguments)]
        with (self._folder / f"{name}.log").open("a") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                text=True,
                env={**os.environ, "TMPDIR": str(self._folder / "temporary")},
            )

    def wait_for(self, name: str, words: str, times: int = 1) -> None:
        """Until it has said so often enough."""
        while (self._folder / f"{name}.log").read_text().count(words) < times:
            said = (self._folder / f"{name}.log").read_text()
            assert self.running[name].poll() is None, said
            time.sleep(0.1)


def silent_once(units_files: Sequence[Path]) -> ClientApp:
    """The same federation in this process: rome is not there in round ``LOST``."""
    trained = [0, 0, 0]

    def client(message: Message, context: Context) -> Message:
        unit = int(context.node_config["partition-id"])
        context.node_config["owner"] = str(units_files[unit])
        if message.metadata.message_type == "train":
            trained[unit] += 1
            if (unit, trained[unit]) == (2, LOST):
                return Message(Error(_GONE, "not there"), reply_to=message)
        return app(message, context)

    return cast(ClientApp, client)


def test_a_federation_on_flower_ends_where_one_in_this_process_does(tmp_path: Path) -> None:
    """With rows at their owners, real devices, a unit that is killed and one that returns; and
    nothing of it is left."""
    (tmp_path / "temporary").mkdir()
    ports = free_port(), free_port()
    folder = create(tmp_path / "federation", UNITS, "127.0.0.1", *ports)
    before = set(psutil.Process().children(recursive=True))
    own = [folder.root / "units" / unit for unit in UNITS]
    for unit, where in zip(UNITS, own, strict=True):
        AuthorityFolder(folder.authority).add(unit, Role.UNIT, 30, where / "credentials")
    with ExitStack() as stack:
        for number, unit in enumerate(own):
            written(unit / "train.csv", 24 + 3 * number, number)
            if number < 2:
                inventory(unit / "boxes.yaml", stack.enter_context(daemons(2)))
                with (unit / "unit.yaml").open("a") as file:
                    file.write("cluster: {file: boxes.yaml}\n")
        told = overrides(tmp_path)
        run_dir = tmp_path / "deployed"
        with Processes(tmp_path) as there:
            there.start("server", "deploy", "serve", folder.root)
            there.wait_for("server", "may come", 3)
            for unit, where in zip(UNITS, own, strict=True):
                there.start(unit, "unit", where / "unit.yaml")
            assert not [each for each in findings(folder.root) if each.error]
            assert not [each for each in findings(own[0] / "unit.yaml") if each.error]
            refuse_strangers(folder, ports[0])
            killer = threading.Thread(target=lose, args=(there, run_dir, own[2]), daemon=True)
            killer.start()
            deployed = "runtime=deployment", f"runtime.federation={folder.root}"
            run_job([*told, *deployed, f"hydra.run.dir={run_dir}"])
            killer.join()
            assert [kept.stat().st_mode & 0o777 for kept in own[2].glob("kept/rome/*")] == [0o600]
            figures = folder.metrics.read_text()
            assert f"collapipe_round {ROUNDS}.0" in figures and "collapipe_devices" in figures
        local = [*told, f"hydra.run.dir={tmp_path / 'local'}"]
        client = silent_once([each / "unit.yaml" for each in own])
        train(InlineGrid(client, 3, {"overrides": shlex.join(local)}), load_overrides(local))
    here, expected = weights(run_dir), weights(tmp_path / "local")
    assert [units(each) for each in (run_dir, tmp_path / "local")] == [
        [[0, 1, 2], [0, 1], [0, 1, 2]]
    ] * 2
    assert here.keys() == expected.keys()
    assert [name for name in here if not torch.equal(here[name], expected[name])] == []
    assert set(psutil.Process().children(recursive=True)) <= before
    commands = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    assert [each for each in commands if str(folder.root) in each] == []


def refuse_strangers(folder: ServerFolder, port: int) -> None:
    """Who speaks no TLS, and whose key nobody has admitted."""
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
    context = ssl.create_default_context(cafile=str(folder.trusted))
    told = urllib.request.urlopen(f"https://127.0.0.1:{port}{ADMITTED}1", context=context)
    assert not json.loads(told.read())["admitted"]
    with pytest.raises(HTTPError, match="401"):
        urllib.request.urlopen(f"https://127.0.0.1:{port}/v1/fleet/x", b"unsigned", context=context)


def overrides(folder: Path) -> list[str]:
    files = [f"data.{s}_file={written(folder / f'{s}.csv', 8)}" for s in ("validation", "test")]
    steady = "pipeline.profile=false", "strategy=all", "federation.num_units=3"
    return [*MODEL, *files, *steady, f"federation.rounds={ROUNDS}"]


def units(run_dir: Path) -> list[list[int]]:
    """Who finished each round."""
    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line)["units"] for line in text.splitlines()]


def lose(there: Processes, run_dir: Path, rome: Path) -> None:
    """Kill rome when round ``LOST`` begins, and start it again; berlin, whose activations the round
    waits for, stands still meanwhile."""
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < LOST - 1:
        time.sleep(0.05)
    there.running["berlin"].send_signal(signal.SIGSTOP)
    try:
        there.running["rome"].send_signal(signal.SIGKILL)
        there.running["rome"].wait()
        time.sleep(_GOODBYE_S)
        there.start("rome", "unit", rome / "unit.yaml")
        there.wait_for("rome", ": dials ", 2)
        time.sleep(_GOODBYE_S)
    finally:
        there.running["berlin"].send_signal(signal.SIGCONT)
