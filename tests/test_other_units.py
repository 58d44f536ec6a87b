"""Runs that go on with other units than they began with."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
from federated import train, weights
from flwr.app import Context, Message
from test_owners import MODEL, written

from client_app.app import app
from collapipe.config import load_overrides
from collapipe.runs.model import read_tokenizer
from collapipe.wire import records
from collapipe.wire.messages import RowsReply
from server_app.grid import InlineGrid


class Federation:
    """Owners with files of their own, some of whom are there."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.words = folder, dict[str, int]()  # that each has told last
        held = written(folder / "held.csv", 8)
        own = f"data.validation_file={held}", f"data.test_file={held}"
        few = "federation.min_units=1", "federation.wait_s=0", "federation.num_units=3"
        often = "federation.checkpoint_every=1", "federation.keep=9", "federation.rounds=4"
        self._options = [*MODEL, *own, *few, *often, "strategy=all", *options]

    def run(self, run_dir: Path, there: Mapping[str, int], resume: str | None = None) -> Path:
        """Train, with these owners and the numbers in their files; each has rows of its own."""
        told = [*self._options, f"hydra.run.dir={run_dir}"]
        files = [self._file(name, number) for name, number in there.items()]

        def client(message: Message, context: Context) -> Message:
            place = int(context.node_config["partition-id"])
            name, number = list(there.items())[place]
            context.node_config.update({"owner": str(files[place]), "partition-id": number})
            try:
                reply = app(message, context)
            finally:
                context.node_config["partition-id"] = place
            if message.metadata.message_type == records.ROWS:
                self.words[name] = len(records.unpack(RowsReply, reply.content).words)
            return reply

        grid = InlineGrid(client, len(there), {"overrides": shlex.join(told)})  # type: ignore[arg-type]
        train(grid, load_overrides(told), resume)
        return run_dir

    def _file(self, name: str, number: int) -> Path:
        rows = written(self.folder / name / "train.csv", 20 + ord(name[0]) % 7, ord(name[0]) % 5)
        file = rows.with_name("unit.yaml")
        file.write_text(f"name: {name}\nnumber: {number}\ndata: {{train_file: train.csv}}\n")
        return file


def finished(run_dir: Path) -> list[list[int]]:
    """The units of each round."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["units"] for line in lines]


@pytest.mark.parametrize(
    ("there", "units"), [({"ann": 0, "cyd": 2}, [0, 2]), ({"ann": 0}, [0])], ids=["other", "fewer"]
)
def test_a_run_goes_on_with_other_units(
    tmp_path: Path, there: dict[str, int], units: list[int]
) -> None:
    """With the tokeniser that it has; nobody is asked for words again."""
    federation = Federation(tmp_path)
    run_dir = federation.run(tmp_path / "run", {"ann": 0, "bob": 1})
    tokenizer = read_tokenizer(run_dir / "model").pack()
    assert federation.words.keys() == {"ann", "bob"} and all(federation.words.values())
    federation.words.clear()
    federation.run(run_dir, there, "000002")
    assert finished(run_dir) == [[0, 1], [0, 1], units, units]
    assert federation.words == dict.fromkeys(there, 0)
    assert read_tokenizer(run_dir / "model").pack() == tokenizer
    assert all(weight.isfinite().all() for weight in weights(run_dir).values())
