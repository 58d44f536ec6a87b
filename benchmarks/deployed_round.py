"""Seconds of a round of a deployed federation on loopback: CollaPipe against stock Flower FedAvg.

    python benchmarks/deployed_round.py --output outputs/deployed_round

Both sides take turns and use the same SuperLink with TLS and node keys, and three units. One side
is ``collapipe unit``, which trains a step of a model of two tiny blocks. The other is Flower's
SuperNode, whose app returns equally many arrays of the same size. Prints the medians and their
ratio with a 95 % interval over the turns. Also prints times that CollaPipe's units report: the work
for a round, the delay until its first micro-batch, and the first message. Then compares masked
rounds with rounds without masks in the same way. Writes ``deployed_round.json``.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from arguments import at_least, writable
from machine import machine
from scipy import stats

from collapipe.cli.run import run_job
from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.bundle import KEY
from collapipe.credentials.keys import openssh
from collapipe.credentials.member import Role
from collapipe.deployment.server_folder import ServerFolder, create
from collapipe.deployment.submitting import submit
from collapipe.flower.commands import Flower, free_port
from collapipe.process import files

HERE = Path(__file__).parent
UNITS = ["a", "b", "c"]
ARRAYS, PAYLOAD_BYTES = 47, 120_000  # as in the model below
MODEL = [
    "task=classification",
    "task.vocabulary=280",
    "model=huggingface",
    "model.family=bert",
    "model.config={num_hidden_layers: 2, hidden_size: 16, num_attention_heads: 2, "
    "intermediate_size: 16}",
    "batch_size=6",
    "strategy=all",
    "federation.local_steps=1",
    "federation.eval_every=99999",
    "federation.checkpoint_every=0",
]
MASKED = [
    "privacy=private",
    "privacy.secure_aggregation=true",
    "privacy.noise_multiplier=0",
    "privacy.max_epsilon=null",
    "optimizer.state=reset",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=writable, default=Path("outputs/deployed_round"))
    parser.add_argument("--turns", type=at_least(1), default=3)
    parser.add_argument("--rounds", type=at_least(1), default=8)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, list[float]] = {"collapipe": [], "masked": [], "stock": []}
    logged_s: dict[str, list[float]] = {"worked": [], "first": [], "later": [], "message": []}
    with tempfile.TemporaryDirectory() as root:
        folder = put_up(Path(root))
        for turn in range(arguments.turns):
            with running(folder, "collapipe"):
                run_dir = folder.root / f"run-{turn}"
                seconds["collapipe"].append(collapipe_round(folder, run_dir, arguments.rounds))
            for unit in UNITS:
                add_logged(logged_s, (folder.root / "units" / unit / "collapipe.log").read_text())
            with running(folder, "collapipe"):
                run_dir = folder.root / f"masked-{turn}"
                masked = collapipe_round(folder, run_dir, arguments.rounds, *MASKED)
                seconds["masked"].append(masked)
            with running(folder, "stock"):
                seconds["stock"].append(stock_round(folder, arguments.rounds))
            print(*(f"{name} {each[-1]:.2f} s" for name, each in seconds.items()), flush=True)
    for first, second in (("collapipe", "stock"), ("masked", "collapipe")):
        ratios = np.array(seconds[first]) / np.array(seconds[second])
        half = stats.t.ppf(0.975, len(ratios) - 1) * ratios.std(ddof=1) / len(ratios) ** 0.5
        print(
            f"{first} / {second} {ratios.mean():.2f}, 95 % interval {ratios.mean() - half:.2f}–"
            f"{ratios.mean() + half:.2f} over {len(ratios)} turns of {arguments.rounds} rounds"
        )
    for what, each in logged_s.items():
        print(f"{what}: {statistics.median(each):.2f} s in the median, {max(each):.2f} s at most")
    result = {"seconds": seconds, "told": logged_s, "machine": machine()}
    (arguments.output / "deployed_round.json").write_text(json.dumps(result, indent=2) + "\n")


def put_up(root: Path) -> ServerFolder:
    """Create a server's folder whose units have certificates and rows."""
    folder = create(root / "federation", UNITS, "127.0.0.1", free_port(), free_port())
    rows = "\n".join(f"row {n} of {n % 7} and {n % 5},{'ab'[n % 2]}" for n in range(30))
    (root / "rows.csv").write_text(f"text,label\n{rows}\n")
    for unit in UNITS:
        own = folder.root / "units" / unit
        AuthorityFolder(folder.authority).add(unit, Role.UNIT, 30, own / "credentials")
        (own / "train.csv").write_text(f"text,label\n{rows}\n")
        key = openssh((own / "credentials" / KEY).read_bytes())
        files.write_new(own / "key", key, files.PRIVATE)
    return folder


@contextmanager
def running(folder: ServerFolder, side: str) -> Iterator[None]:
    """Run the SuperLink and the units of one side."""
    ours = [sys.executable, "-m", "collapipe"]
    flower = Flower.at(folder.flower_home)
    server = folder.root / "server.log"
    with server.open("w") as log:
        processes = [subprocess.Popen([*ours, "deploy", "serve", folder.root], stdout=log)]
    try:
        while server.read_text().count(" admitted") < len(UNITS):
            time.sleep(0.2)
        for number, unit in enumerate(UNITS):
            own = folder.root / "units" / unit
            command = [*ours, "unit", own / "unit.yaml"]
            if side == "stock":
                command = ["flower-supernode", "--node-config", f"partition-id={number}"]
                command += ["--superlink", f"127.0.0.1:{folder.settings().port}"]
                command += ["--auth-supernode-private-key", own / "key", "--port", str(free_port())]
                command += ["--root-certificates", folder.trusted]
            with (own / f"{side}.log").open("w") as log:
                node = subprocess.Popen(
                    [str(part) for part in command],
                    stdout=log,
                    stderr=log,
                    env=flower.environment,
                    cwd=flower.folder,
                )
            processes.append(node)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def collapipe_round(folder: ServerFolder, run_dir: Path, rounds: int, *options: str) -> float:
    """Median seconds from the end of a round to the end of the next."""
    rows = folder.root.parent / "rows.csv"
    files = [f"data.{each}_file={rows}" for each in ("validation", "test")]
    own = ["runtime=deployment", f"runtime.federation={folder.root}", f"hydra.run.dir={run_dir}"]
    run_job([*MODEL, *files, *own, *options, f"federation.rounds={rounds}"])
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return float(np.median(np.diff([json.loads(line)["wall_s"] for line in lines])))


def stock_round(folder: ServerFolder, rounds: int) -> float:
    """The same median with Flower's FedAvg."""
    output = folder.root / "ends.json"
    options = [str(rounds), str(PAYLOAD_BYTES), str(output), str(ARRAYS)]
    if not submit(str(folder.root), HERE / "stock_fedavg", folder.root / "stock", options):
        raise SystemExit("the stock run failed")
    return float(np.median(np.diff(json.loads(output.read_text())[1:])))


def add_logged(logged_s: dict[str, list[float]], log: str) -> None:
    """Add seconds from a unit's log: ``worked`` in each round; until the first micro-batch of its
    ``first`` round and of ``later`` rounds; and of its first ``message``."""
    rounds = re.findall(r"train: ([\d.]+) s, the first micro-batch after ([\d.]+) s", log)
    first, *later = (float(start) for _, start in rounds)
    logged_s["worked"] += [float(worked) for worked, _ in rounds]
    logged_s["first"].append(first)
    logged_s["later"] += later
    logged_s["message"] += [float(each) for each in re.findall(r"query\.rows: ([\d.]+) s", log)]


if __name__ == "__main__":
    main()
