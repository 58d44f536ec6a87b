"""Table III on real processes: a device's peak memory, for several splits of the encoder.

It trains BERT's twelve blocks of width 768 on daemons of this machine with mutual TLS, on the task
``dates``, which needs no files. In VanillaFL each device is a user: a separate cluster with the
whole encoder; two users suffice. For all methods the control unit has the embedding and the server
has the head. So VanillaFL's figure is lower than for a device with the whole model.
"""

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from collapipe.cli.app import child_command
from collapipe.config.overrides import setting
from collapipe.errors import RoundFailedError
from collapipe.process.folders import TemporaryFolder
from collapipe.runs.evidence import Interval, over_seeds
from collapipe.runs.reading import read_run
from reproduction import drawing
from reproduction.figure import Finding, Ours, PaperFigure, Row, above, reduction

_DEVICES = 4
_GB = 1e9
_BERT = (
    "model.num_blocks=12",
    "model.dim=768",
    "model.num_heads=12",
    "model.feed_forward_dim=3072",
)
_SIZES = ("model.num_decoder_blocks=1", "batch_size=16", "federation.rounds=2")
_SHORT = ("federation.local_steps=2", "task.validation_rows=8", "task.test_rows=8")
VANILLA, EVEN, OWN = "VanillaFL", "even split", "CollaPipe"


@dataclass(frozen=True, slots=True)
class Method:
    """A method's arguments of ``collapipe up``, and the options of its run."""

    up: tuple[str, ...]
    run: tuple[str, ...] = ()


_USERS = 2  # of VanillaFL
METHODS: Mapping[str, Method] = {
    VANILLA: Method(
        ("--devices", "1", "--clusters", str(_USERS), "--memory", "4GB"),
        (f"channel.num_channels={_USERS}",),
    ),
    EVEN: Method(("--devices", str(_DEVICES), "--memory", "4GB"), ("framework=pipeline",)),
    OWN: Method(("--devices", str(_DEVICES), "--memory", "1.2GB,0.8GB,0.8GB,0.4GB")),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a method's last round: devices' blocks and peak memory, users, seconds."""

    blocks: tuple[int, ...]
    peak_gb: tuple[float, ...]
    users: int
    round_s: float


Results = Mapping[str, Measured]


def _compute(seed: int) -> Results:
    return {name: _measured(name, method, seed) for name, method in METHODS.items()}


def _measured(name: str, method: Method, seed: int) -> Measured:
    """Run a method. Raises ``RoundFailedError`` with the last line of a run that fails."""
    with TemporaryFolder("table") as folder:
        run_dir = folder / "run"
        options = (*_BERT, *_SIZES, *_SHORT, *method.run, f"seed={seed}")
        where = setting("hydra.run.dir", run_dir)
        status, output = _ended(child_command("up", *method.up, "--", "run", *options, where))
        if status:
            raise RoundFailedError(f"{name}: {output.strip().splitlines()[-1]}")
        before, last = read_run(run_dir).rounds[-2:]
    reports = [each for unit in last.devices.values() for each in unit]
    return Measured(
        tuple(each.blocks for each in reports),
        tuple(each.peak_bytes / _GB for each in reports),
        len(last.devices),
        last.wall_s - before.wall_s,
    )


def _ended(command: Sequence[str]) -> tuple[int, str]:
    """Run a command and return its exit status and errors; an interrupt here ends it too."""
    with subprocess.Popen(  # noqa: S603 - our own
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate()
        except BaseException:
            process.terminate()
            process.wait()  # its devices end with it
            raise
        return process.returncode, errors or "no output"


def _rows(seed: int, results: Results) -> Iterator[Row]:
    for name, each in results.items():
        for device, (blocks, peak) in enumerate(zip(each.blocks, each.peak_gb, strict=True)):
            yield seed, name, each.users, device, blocks, peak, each.round_s


def _findings(seeds: Sequence[Results]) -> Iterator[Finding]:
    def over(name: str, figure: Callable[[Measured], float]) -> Interval:
        return over_seeds(figure(each[name]) for each in seeds)

    for name in (EVEN, OWN):
        less = reduction(seeds, name, VANILLA, lambda each: max(each.peak_gb))
        text = f"{name}: the fullest device's peak memory below VanillaFL's"
        yield above(text, "adapted to the device", less, "%", 0.0)
    for name in METHODS:
        yield Finding(
            f"{name}: the fullest device", over(name, lambda each: max(each.peak_gb)), "GB"
        )
        yield Finding(
            f"{name}: the emptiest device", over(name, lambda each: min(each.peak_gb)), "GB"
        )
        yield Finding(
            f"{name}: devices a user", over(name, lambda each: len(each.blocks) / each.users), ""
        )
        yield Finding(f"{name}: a round", over(name, lambda each: each.round_s), "s")


def _draw(seeds: Sequence[Results], _: Ours) -> Figure:
    """Draw a bar for each device, from the last seed's run."""
    figure, (axes,) = drawing.panels(2.6, 1)
    place = 0.0
    ticks = []
    for mark, (name, each) in zip(drawing.MARKS, seeds[-1].items(), strict=False):
        places = [place + k for k in range(len(each.blocks))]
        axes.bar(places, each.peak_gb, 0.8, **mark.as_bar())
        for x, blocks, peak in zip(places, each.blocks, each.peak_gb, strict=True):
            axes.annotate(f"{blocks}", (x, peak), ha="center", va="bottom")
        ticks.append((sum(places) / len(places), f"{name}\nusers: {each.users}"))
        place += len(places) + 1
    axes.set_xticks([where for where, _ in ticks], [text for _, text in ticks])
    axes.set_ylabel("peak memory of a device [GB]\n(blocks above the bar)")
    return figure


FIGURE = PaperFigure(
    "table3",
    ("seed", "method", "users", "device", "blocks", "peak_gb", "round_s"),
    _compute,
    _rows,
    _findings,
    _draw,
    settings={"devices": _DEVICES, "model": "12 blocks of 768", "batch_size": 16},
    num_seeds=1,
    basis="measured on processes of this machine: resident memory, interpreter and torch included",
)
