"""A deployed federation: a SuperLink and two units with their own rows and keys, one of them with
devices, as processes on loopback with TLS."""

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast
from urllib.error import HTTPError
from venv import EnvBuilder

import psutil
import pytest
import torch
from device_cluster import daemons
from federated import TINY, train, weights
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from requirements_files import ROOT, installed
from run_files import rounds_of, summary_of
from test_devices import inventory
from test_owners import WORDS

from client_app.app import app
from collapipe.cli.run import run_job
from collapipe.config import load_overrides
from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.member import Role
from collapipe.deployment.checking import findings
from collapipe.deployment.overview import RunThere, UnitThere, overview
from collapipe.deployment.server_folder import ADMITTED, SERVER_FOLDER, ServerFolder, create
from collapipe.flower.commands import free_port
from collapipe.flower.inline_grid import InlineGrid

UNITS = ["berlin", "rome"]
LOST = 2  # rome is killed when this round begins; if there are four rounds, it returns in the last
_GOODBYE_S = 1.0  # for the server to notice that a unit was killed or has started
_UNAVAILABLE = 5  # Flower's error code for an unavailable node
# No model of transformers: six processes would import it, each for two seconds of a core.
MODEL = "task=multi30k", *(each for each in TINY if "_rows" not in each), "model.num_blocks=2"


class Processes:
    """Processes of ``collapipe``, each with a log; they and their children end with the context."""

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

    def start(self, name: str, *arguments: object, python: str | Path = sys.executable) -> None:
        command = [str(python), "-m", "collapipe", *map(str, arguments)]
        own = {"TMPDIR": str(self._folder / "temporary"), "PYTHONPATH": str(ROOT)}
        with (self._folder / f"{name}.log").open("a") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                text=True,
                env={**os.environ, **own},
            )

    def wait_for(self, name: str, words: str, times: int = 1) -> None:
        """Wait until the log contains ``words`` at least ``times`` times."""
        while (self._folder / f"{name}.log").read_text().count(words) < times:
            log = (self._folder / f"{name}.log").read_text()
            assert self.running[name].poll() is None, log
            time.sleep(0.1)


class Losing(InlineGrid):
    """The same federation in this process: rome fails in round ``LOST`` and returns after the next
    round has begun, if there is one."""

    def __init__(self, units_files: Sequence[Path]) -> None:
        super().__init__(cast(ClientApp, self._answer), len(UNITS))
        self._files, self._trained = units_files, [0, 0]

    def get_node_ids(self) -> Iterable[int]:
        nodes = [*super().get_node_ids()]
        return nodes[:1] if self._trained[0] == LOST else nodes

    def _answer(self, message: Message, context: Context) -> Message:
        unit = int(context.node_config["partition-id"])
        context.node_config["owner"] = str(self._files[unit])
        if message.metadata.message_type == "train":
            self._trained[unit] += 1
            if (unit, self._trained[unit]) == (1, LOST):
                return Message(Error(_UNAVAILABLE, "not there"), reply_to=message)
        return app(message, context)


@pytest.mark.timeout(900)  # a dozen processes import torch
@pytest.mark.parametrize(
    "trained_in",
    [[[0, 1], [0]], pytest.param([[0, 1], [0], [0], [0, 1]], marks=pytest.mark.thorough)],
)
def test_a_deployed_federation_has_the_weights_of_one_in_this_process(
    trained_in: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owners have their own rows and hold some out; one unit has real devices. The other unit is
    killed, may return, and has only a unit's extras installed. No process remains at the end."""
    returns = trained_in[-1] == [0, 1]
    (tmp_path / "temporary").mkdir()
    light = light_python(tmp_path / "light")
    ports = free_port(), free_port()
    folder = create(tmp_path / "federation", UNITS, "127.0.0.1", *ports)
    before = set(psutil.Process().children(recursive=True))
    own = [folder.root / "units" / unit for unit in UNITS]
    for unit, where in zip(UNITS, own, strict=True):
        AuthorityFolder(folder.authority).add(unit, Role.UNIT, 30, where / "credentials")
    with ExitStack() as stack:
        for number, unit in enumerate(own):
            written(unit / "train.csv", 24 + 3 * number, number)
            written(unit / "held.csv", 6, number)
            held = "data:\n  validation_file: held.csv\n  test_file: held.csv\n"
            own_file = unit / "unit.yaml"
            own_file.write_text(own_file.read_text().replace("data:\n", held))
            if not number:
                boxes = stack.enter_context(daemons(2))
                inventory(unit / "boxes.yaml", boxes, max_blocks=1)
                with (unit / "unit.yaml").open("a") as file:
                    file.write("cluster: {file: boxes.yaml}\n")
        options = overrides(tmp_path, len(trained_in))
        run_dir = tmp_path / "deployed"
        with Processes(tmp_path) as there:
            there.start("server", "deploy", "serve", folder.root)
            there.wait_for("server", " admitted", len(UNITS))
            there.start("berlin", "unit", own[0] / "unit.yaml")
            there.start("rome", "unit", own[1] / "unit.yaml", python=light)
            assert not [each for each in findings(folder.root) if each.error]
            assert not [each for each in findings(own[0] / "unit.yaml") if each.error]
            refuse_strangers(folder, ports[0])
            seen = list[tuple[list[UnitThere], list[RunThere]]]()
            losing = there, run_dir, folder, light if returns else None, seen
            killer = threading.Thread(target=lose, args=losing, daemon=True)
            killer.start()
            deployed = "runtime=deployment", f"runtime.federation={folder.root}"
            run_job([*options, *deployed, f"hydra.run.dir={run_dir}"])
            killer.join()
            assert {kept.stat().st_mode & 0o777 for kept in own[1].glob("kept/rome/*")} == {0o600}
            ((units_then, runs_then),) = seen
            assert [(each.name, each.state) for each in units_then] == [
                ("berlin", "online"),
                ("rome", "offline"),
            ]
            assert [(each.state, each.folder) for each in runs_then] == [("running", run_dir)]
            figures = folder.metrics.read_text()
            assert (
                f"collapipe_round {len(trained_in)}.0" in figures and "collapipe_devices" in figures
            )
        local = [*options, f"hydra.run.dir={tmp_path / 'local'}"]
        monkeypatch.setenv(SERVER_FOLDER, str(folder.root))  # whose certificate the units expect
        names = dict(enumerate(UNITS, 2))  # nodes of a grid in one process have no certificates
        monkeypatch.setattr("server_app.training.signed_names", lambda of: names)
        monkeypatch.setattr("federated.MOST_TOKENS", 10**6)  # as on Flower
        train(Losing([each / "unit.yaml" for each in own]), load_overrides(local))
    here, expected = weights(run_dir), weights(tmp_path / "local")
    assert [units(each) for each in (run_dir, tmp_path / "local")] == [trained_in] * 2
    assert here.keys() == expected.keys()
    assert [name for name in here if not torch.equal(here[name], expected[name])] == []
    ends = [summary_of(each)["on_units"] for each in (run_dir, tmp_path / "local")]
    assert ends[0]["rows"] == {"0": 6, **({"1": 5} if returns else {})} and ends[0] == ends[1]
    assert set(psutil.Process().children(recursive=True)) <= before
    commands = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    assert [each for each in commands if str(folder.root) in each] == []


def written(file: Path, count: int, first: int = 0) -> Path:
    """Write pairs of sentences, numbered from ``first`` to ``count - 1``."""
    pairs = [f"the {WORDS[n % 6]} sees {WORDS[n % 5]},{WORDS[n % 5]} sees" for n in range(count)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(["source,target", *pairs[first:]]) + "\n")
    return file


def light_python(folder: Path) -> Path:
    """Make a Python environment with only the packages that a unit's extras install."""
    EnvBuilder(symlinks=True).create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = installed(["unit", "hf"], folder / "lib" / version / "site-packages")
    there = {each.name for each in site.iterdir()}
    assert not there & {"ray", "cvxpy", "matplotlib", "sklearn", "flwr_datasets"}
    return folder / "bin" / "python"


def refuse_strangers(folder: ServerFolder, port: int) -> None:
    """Check that the server refuses clients without TLS and clients whose key is not admitted."""
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
    context = ssl.create_default_context(cafile=str(folder.trusted))
    response = urllib.request.urlopen(f"https://127.0.0.1:{port}{ADMITTED}1", context=context)
    assert not json.loads(response.read())["admitted"]
    with pytest.raises(HTTPError, match="401"):
        urllib.request.urlopen(f"https://127.0.0.1:{port}/v1/fleet/x", b"unsigned", context=context)
    assert (folder.flower_home / "superlink.log").read_text().count("127.0.0.1 is refused") == 2


def overrides(folder: Path, num_rounds: int) -> list[str]:
    files = [f"data.{s}_file={written(folder / f'{s}.csv', 8)}" for s in ("validation", "test")]
    steady = "pipeline.profile=false", "strategy=all", "federation.num_units=2"
    # units may start slowly on a busy machine
    rounds = f"federation.rounds={num_rounds}", "evaluation.where=both", "federation.wait_s=300"
    return [*MODEL, *files, *steady, *rounds]


def units(run_dir: Path) -> list[list[int]]:
    """Return the units that finished each round."""
    return [line["units"] for line in rounds_of(run_dir)]


def lose(
    there: Processes,
    run_dir: Path,
    server: ServerFolder,
    python: Path | None,
    seen: list[tuple[list[UnitThere], list[RunThere]]],
) -> None:
    """Kill rome when round ``LOST`` begins; with a ``python``, start it again in the next round.
    Append the server's overview in between to ``seen``."""
    rome = server.root / "units" / "rome"
    with during_round(LOST, there, run_dir):
        there.running["rome"].send_signal(signal.SIGKILL)
        there.running["rome"].wait()
        time.sleep(_GOODBYE_S)
        seen.append(overview(server))
    if python is None:
        return
    with during_round(LOST + 1, there, run_dir):
        there.start("rome", "unit", rome / "unit.yaml", python=python)
        there.wait_for("rome", ": dials ", 2)
        time.sleep(_GOODBYE_S)


@contextmanager
def during_round(number: int, there: Processes, run_dir: Path) -> Iterator[None]:
    """Pause berlin, so that the round waits for its activations."""
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < number - 1:
        time.sleep(0.05)
    there.running["berlin"].send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        there.running["berlin"].send_signal(signal.SIGCONT)
