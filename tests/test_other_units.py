"""Runs that resume with other units than they began with."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from federated import train, weights
from flwr.app import Context, Error, Message
from resumed import differing, outcome, tensors
from run_files import rounds_of
from scripted_units import UNTRAINED, scripted_units
from test_owners import MODEL, written

from collapipe.config import load_overrides
from collapipe.errors import WireError
from collapipe.flower import reply_limit
from collapipe.flower.inline_grid import InlineGrid
from collapipe.runs.model import read_tokenizer
from collapipe.wire import records
from collapipe.wire.kept_file import flat
from collapipe.wire.messages import RowsReply
from server_app import training
from server_app.checkpoints.folder import CheckpointFolder
from server_app.places import Places


class Federation:
    """Runs with scripted units, of which each has an owner file."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.words = folder, dict[str, int]()  # words that each owner reported last
        self.late = dict[
            str, tuple[str, int]
        ]()  # owner → question that it answers once with an error, and the error's code
        self.leaves = dict[str, int]()  # owner → first round in which its training fails
        held = written(folder / "held.csv", 8)
        own = f"data.validation_file={held}", f"data.test_file={held}"
        few = "federation.min_units=1", "federation.wait_s=0", "federation.num_units=3"
        often = "federation.checkpoint_every=1", "federation.keep=9", "federation.rounds=4"
        self._options = [*MODEL, *own, *few, *often, "strategy=all", *UNTRAINED, *options]

    def run(self, run_dir: Path, there: Mapping[str, int], resume: str | None = None) -> Path:
        """Train with these owners, whose files have these numbers and different rows."""
        options = [*self._options, f"hydra.run.dir={run_dir}"]
        files = [self._file(name, number) for name, number in there.items()]
        units = scripted_units()

        def client(message: Message, context: Context) -> Message:
            place = int(context.node_config["partition-id"])
            name, number = list(there.items())[place]
            kind = message.metadata.message_type
            late_kind, code = self.late.get(name, ("", 0))
            if late_kind == kind:
                del self.late[name]
                return Message(Error(code, "not there"), reply_to=message)
            if kind == records.TRAIN and self.leaves.get(name, 9) <= int(message.metadata.group_id):
                return Message(Error(5, "not there"), reply_to=message)
            context.node_config.update({"owner": str(files[place]), "partition-id": number})
            try:
                reply = units(message, context)
            finally:
                context.node_config["partition-id"] = place
            if kind == records.ROWS:
                self.words[name] = len(records.unpack(RowsReply, reply.content).words)
            return reply

        grid = InlineGrid(client, len(there))  # type: ignore[arg-type]
        train(grid, load_overrides(options), resume)
        return run_dir

    def _file(self, name: str, number: int) -> Path:
        rows = written(self.folder / name / "train.csv", 20 + ord(name[0]) % 7, ord(name[0]) % 5)
        file = rows.with_name("unit.yaml")
        file.write_text(f"name: {name}\nnumber: {number}\ndata: {{train_file: train.csv}}\n")
        return file


def finished(run_dir: Path) -> list[list[int]]:
    """The units that trained in each round."""
    return [line["units"] for line in rounds_of(run_dir)]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federation, Path]:
    """A run of four rounds with two owners; each test copies its folder."""
    folder = tmp_path_factory.mktemp("owners")
    federation = Federation(folder)
    whole = federation.run(folder / "whole", {"ann": 0, "bob": 1})
    assert federation.words.keys() == {"ann", "bob"} and all(federation.words.values())
    return federation, whole


@pytest.mark.parametrize(
    ("there", "units"),
    [({"ann": 0, "cyd": 2}, [0, 2]), pytest.param({"ann": 0}, [0], marks=pytest.mark.thorough)],
    ids=["other", "fewer"],
)
def test_a_run_resumes_with_other_units(
    first: tuple[Federation, Path],
    tmp_path: Path,
    there: dict[str, int],
    units: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tokeniser stays, and units report no words again. A missing unit keeps its place and its
    state, and it continues from this state when it is present again."""
    federation, whole = first
    run_dir = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    tokenizer = read_tokenizer(run_dir / "model").pack()
    federation.words.clear()
    federation.run(run_dir, there, "000002")
    assert finished(run_dir) == [[0, 1], [0, 1], units, units]
    assert federation.words == dict.fromkeys(there, 0)
    assert read_tokenizer(run_dir / "model").pack() == tokenizer
    assert all(weight.isfinite().all() for weight in weights(run_dir).values())
    printed = capsys.readouterr().out
    assert ("new: cyd" in printed) == ("cyd" in there)
    assert "missing: bob" in printed
    parts = [CheckpointFolder(run_dir).read(name) for name in ("000002", "000004")]
    bobs = [flat(part.training.units[1]) for part in parts]
    assert differing(*bobs) == [] != [*bobs[0]]
    federation.run(run_dir, {**there, "bob": 1}, "000003")
    assert finished(run_dir) == [[0, 1], [0, 1], units, sorted({*units, 1})]
    last = capsys.readouterr().out
    assert "resumes after round 3" in last and "missing: bob" not in last and "new:" not in last


@pytest.mark.parametrize(
    "late",
    [
        pytest.param((records.STATE, 5), marks=pytest.mark.thorough),
        (records.RESTORE, 5),
        pytest.param((records.RESTORE, 0), marks=pytest.mark.thorough),
    ],
    ids=["absent for state", "absent for restore", "fails to restore"],
)
def test_a_unit_that_replies_late_on_resume_continues_from_its_state(
    first: tuple[Federation, Path], tmp_path: Path, late: tuple[str, int]
) -> None:
    """A unit that does not reply at once, but before the first resumed round, gives the same result
    as a unit that replies at once."""
    federation, whole = first
    again = shutil.copytree(whole, tmp_path / "again", symlinks=True)
    federation.late = {"bob": late}
    federation.run(again, {"ann": 0, "bob": 1}, "000002")
    assert not federation.late
    assert finished(again) == [[0, 1]] * 4
    assert differing(tensors(again), tensors(whole)) == []


@pytest.mark.thorough
def test_a_checkpoint_keeps_the_state_of_an_absent_unit(
    first: tuple[Federation, Path], tmp_path: Path
) -> None:
    """Later checkpoints copy the state from the last one before the unit left."""
    federation, whole = first
    again = shutil.copytree(whole, tmp_path / "again", symlinks=True)
    federation.leaves = {"bob": 3}
    federation.run(again, {"ann": 0, "bob": 1}, "000001")
    federation.leaves.clear()
    assert finished(again) == [[0, 1], [0, 1], [0], [0]]
    parts = [CheckpointFolder(again).read(f"{round_:06}").training.units for round_ in (2, 3, 4)]
    kept = [flat(part[1]) for part in parts]
    assert kept[0] and [differing(each, kept[0]) for each in kept[1:]] == [[], []]


def test_a_unit_keeps_its_place_if_its_number_changes(
    first: tuple[Federation, Path], tmp_path: Path
) -> None:
    """Two owners swap their numbers, and the resumed run still equals the uninterrupted one."""
    federation, whole = first
    again = shutil.copytree(whole, tmp_path / "again", symlinks=True)
    federation.run(again, {"bob": 0, "ann": 1}, "000002")
    assert CheckpointFolder(again).read("000004").progress.names == {"ann": 0, "bob": 1}
    assert differing(tensors(again), tensors(whole)) == []
    assert outcome(again) == outcome(whole)


def test_a_unit_that_claims_another_units_number_is_refused_and_both_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other unit may be present or missing."""
    federation = Federation(tmp_path)
    with caplog.at_level(logging.WARNING, "server_app.exclusions"):
        run_dir = federation.run(tmp_path / "run", {"ann": 0, "bob": 1, "cyd": 1})
        assert "unit 1 is bob, and cyd claims the same number" in caplog.text
        caplog.clear()
        federation.run(run_dir, {"ann": 0, "cyd": 1}, "000002")
        assert "unit 1 is bob, and cyd claims the same number" in caplog.text
    assert finished(run_dir) == [[0, 1], [0, 1], [0], [0]]


def test_a_federations_server_refuses_a_name_that_is_not_in_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noted, expected = list[Path](), list[int]()
    monkeypatch.setattr(reply_limit, "expected", reply_limit.Expected())
    server = SimpleNamespace(
        note_run=lambda run_id, run_dir: noted.append(run_dir),
        expect_replies=lambda run_id, question, most_bytes: expected.append(most_bytes),
        forget_questions=lambda run_id: expected.append(0),
        settings=lambda: SimpleNamespace(units=["ann", "eve"]),
    )
    monkeypatch.setattr(training, "own_folder", lambda: server)
    monkeypatch.setattr(
        training, "signed_names", lambda of: {2: "ann", 3: "eve"} if of is server else {}
    )
    with caplog.at_level(logging.WARNING, "server_app.exclusions"):
        run_dir = Federation(tmp_path).run(tmp_path / "run", {"ann": 0, "bob": 1})
    assert "a node reported the name 'bob', its certificate names eve" in caplog.text
    assert finished(run_dir) == [[0]] * 4 and noted == [run_dir]
    assert expected.pop() == 0 and expected == sorted(expected)
    assert len(expected) > 2 and expected[0] > 0


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("cyd", 5, "unit 5, expected 0 … 2"),
        ("", 1, "unit 1 is bob, and a node without a name"),
        ("ann", 2, "two nodes are called ann"),
        ("", 2, "two nodes reported to be unit 2"),
    ],
)
def test_an_invalid_name_or_number_gets_no_place(name: str, number: int, words: str) -> None:
    places = Places({"ann": 0, "bob": 1})
    with pytest.raises(WireError, match=words):
        places.claim(name, number, 3, {0, 2})
    assert places.of == {"ann": 0, "bob": 1}
