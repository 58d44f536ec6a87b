"""Units evaluate the global model on their own rows; the results equal an evaluation of all
rows."""

from collections.abc import Callable, Iterable
from csv import DictReader
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import UNEVEN, grid_of, play, settings_of, train, weights
from flwr.app import Context, Message, RecordDict
from run_files import rounds_of, summary_of
from scripted_units import UNTRAINED, scripted_units

from client_app.app import app
from collapipe.config import load_overrides
from collapipe.flower.inline_grid import InlineGrid
from collapipe.run_report.page import run_page
from collapipe.runs.reading import read_run
from collapipe.runs.rows import load_held_out
from collapipe.wire import records

OFTEN = ("federation.eval_every=1", "task.validation_rows=10", "task.test_rows=7")
BERT = (
    "task=classification",
    "model=huggingface",
    "data=synthetic",
    "data.max_eval_samples=12",
    "task.vocabulary=300",
    "batch_size=8",
    "model.family=bert",
    "model.config={num_hidden_layers: 2, hidden_size: 16, num_attention_heads: 2, "
    "intermediate_size: 16}",
)


def figures(loss: float, metric: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return everything except the signature, which names the rows."""
    return loss, {key: value for key, value in metric.items() if key != "signature"}


def test_units_and_server_evaluate_equally_and_change_no_weight(tmp_path: Path) -> None:
    """The server's rows are divided unevenly among the units. Results are equal in each round and
    at the end."""
    options = *OFTEN, UNEVEN, "federation.local_steps=1", "model.num_blocks=2"
    play(tmp_path / "server", *options)
    play(tmp_path / "both", *options, "evaluation.where=both")
    play(tmp_path / "units", *options, "evaluation.where=units")
    ends = [weights(tmp_path / name) for name in ("server", "both", "units")]
    for end in ends[1:]:
        assert all(torch.equal(end[name], tensor) for name, tensor in ends[0].items())
    for alone, line, units in zip(
        *(rounds_of(tmp_path / name) for name in ("server", "both", "units")), strict=True
    ):
        on_units = line["on_units"]
        expected = figures(line["evaluation_loss"], line["metric"])
        assert figures(on_units["loss"], on_units["metric"]) == expected
        assert figures(units["evaluation_loss"], units["metric"]) == expected
        assert "on_units" not in alone
        assert alone["evaluation_loss"] == pytest.approx(expected[0], rel=1e-6)
        assert sorted(on_units["rows"].values()) == [1, 3, 6]
        assert (on_units["failures"], on_units["metric"]["signature"].split("|")[-1]) == (
            {},
            "rows apart, of 3 units",
        )
    found = summary_of(tmp_path / "both")
    assert figures(found["on_units"]["loss"], found["on_units"]["metric"]) == figures(
        found["test_loss"], found["metric"]
    )
    assert "on_units" not in summary_of(tmp_path / "server")
    pages = [run_page(read_run(tmp_path / name), None) for name in ("both", "units")]
    assert ["BLEU on units" in page for page in pages] == [True, False]


@pytest.mark.parametrize(
    "head", ["per_cluster", pytest.param("control_unit", marks=pytest.mark.thorough)]
)
def test_frozen_weights_are_sent_to_units_once(tmp_path: Path, head: str) -> None:
    """This includes the frozen weights of a head that trains on the server."""
    run = "adapter=lora", "evaluation.where=both", "federation.rounds=1"
    short = "federation.num_units=2", "federation.local_steps=1", "federation.checkpoint_every=0"
    settled = [*BERT, *run, *short, f"decoder.mode={head}", f"hydra.run.dir={tmp_path}"]
    settings = load_overrides(settled)
    train(grid_of(settings), settings)
    (line,) = rounds_of(tmp_path)
    assert figures(line["on_units"]["loss"], line["on_units"]["metric"]) == figures(
        line["evaluation_loss"], line["metric"]
    )
    model = sum(tensor.nbytes for tensor in weights(tmp_path).values())
    assert line["on_units"]["bytes_down"] < model


@pytest.mark.parametrize(
    "framework", ["splitfed", pytest.param("vanilla_fl", marks=pytest.mark.thorough)]
)
def test_units_evaluate_the_whole_model_in_other_frameworks(tmp_path: Path, framework: str) -> None:
    options = *OFTEN, "federation.local_steps=1"
    play(
        tmp_path, *options, f"framework={framework}", "evaluation.where=both", "model.num_blocks=8"
    )
    for line in rounds_of(tmp_path):
        expected = figures(line["evaluation_loss"], line["metric"])
        assert figures(line["on_units"]["loss"], line["on_units"]["metric"]) == expected


def test_units_with_separate_models_evaluate_their_own_models(tmp_path: Path) -> None:
    options = *OFTEN, "federation.local_steps=1"
    play(tmp_path, *options, "framework=pipeline", "evaluation.where=units")
    signature = summary_of(tmp_path)["metric"]["signature"]
    assert signature.endswith("|rows apart, of 3 units with models of their own")


def answering(evaluate: Callable[[int, Message, Context], Message]) -> Any:
    """Return a ClientApp that handles evaluation messages with ``evaluate``."""

    trains = scripted_units()

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type != records.EVALUATE:
            return trains(message, context)
        return evaluate(int(context.node_config["partition-id"]), message, context)

    return client


def test_a_failed_evaluation_is_excluded_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One unit raises, and one reports invalid counts. The figures are the third unit's, and all
    units train in each round."""

    def evaluate(unit: int, message: Message, context: Context) -> Message:
        reply = app(message, context)
        if unit == 0:
            raise ValueError("no memory")
        if unit == 1:
            counts = torch.full((10,), -1)
            reply.content["counts"] = records.pack_tensors({"counts": counts})
        return reply

    play(tmp_path, *OFTEN, *UNTRAINED, client=answering(evaluate))
    for line in rounds_of(tmp_path):
        on_units = line["on_units"]
        assert line["units"] == [0, 1, 2]
        assert on_units["rows"] == {"2": 3}
        assert list(on_units["failures"]) == ["0", "1"]
        assert "no memory" in on_units["failures"]["0"]
        assert on_units["failures"]["1"].startswith("WireError: reported rows")
        assert line["metric"]["signature"].endswith("of 1 unit")
    printed = " ".join(capsys.readouterr().out.split())
    assert "on 3 rows of 1 unit" in printed
    assert "round 1/2 evaluated without unit 0: ClientApp" in printed


def test_the_evaluation_of_a_silent_unit_is_excluded_and_reported(tmp_path: Path) -> None:
    """The unit trains in each round."""
    settings = settings_of(tmp_path, [*OFTEN, *UNTRAINED])
    grid = grid_of(settings, scripted_units(evaluates=True))
    silent = list(grid.get_node_ids())[1]

    def without_silent(
        messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = InlineGrid.send_and_receive(grid, messages, timeout=timeout)
        kinds = [(each.metadata.message_type, each.metadata.src_node_id) for each in replies]
        return [
            each
            for each, kind in zip(replies, kinds, strict=True)
            if kind != (records.EVALUATE, silent)
        ]

    grid.send_and_receive = without_silent  # type: ignore[method-assign]
    train(grid, settings)
    for line in rounds_of(tmp_path):
        assert line["units"] == [0, 1, 2]
        assert list(line["on_units"]["rows"]) == ["0", "2"]
        assert line["on_units"]["failures"]["1"].startswith("Timeout: no answer to evaluate")
    with (tmp_path / "metrics.csv").open() as file:
        cells = [(row["evaluated_units"], row["unevaluated_units"]) for row in DictReader(file)]
    assert cells == [("0 2", "1")] * 2


def test_if_all_evaluations_fail_the_run_completes_without_a_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(unit: int, message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    play(tmp_path, *OFTEN, *UNTRAINED, client=answering(evaluate))
    for line in rounds_of(tmp_path):
        assert ("metric" in line, len(line["on_units"]["failures"])) == (False, 3)
    assert len(rounds_of(tmp_path)) == 2
    found = summary_of(tmp_path)
    assert (found["status"], found["metric"], len(found["on_units"]["failures"])) == (
        *("completed", None),
        3,
    )
    assert "round 2/2 no evaluation on units" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("partitioner", ["iid", "dirichlet", "natural_id"])
def test_each_row_of_the_server_belongs_to_one_unit(tmp_path: Path, partitioner: str) -> None:
    """A unit may have no row. With natural ids, a unit has the rows of the id that it trains on;
    the first id has none here."""
    users = [f"u{n % 3}" for n in range(60)]
    trained, test = tmp_path / "train.csv", tmp_path / "test.csv"
    rows = [f"t{n},l{n % 2},{user}" for n, user in enumerate(users)]
    trained.write_text("\n".join(["text,label,user", *rows]))
    test.write_text("text,label,user\nx,l0,u2\ny,l1,u1\nz,l0,u2\nw,l1,u2\n")
    by = ["data.partitioner.partition_by=user"] if partitioner == "natural_id" else []
    model = [option for option in BERT if "data" not in option]
    files = [f"data.{split}_file={test}" for split in ("validation", "test")]
    cut = [f"partitioner={partitioner}", *by]
    settings = load_overrides([*model, *files, *cut, f"data.train_file={trained}"])
    held = [load_held_out(settings, unit, "validation") for unit in range(3)]
    texts = [[] if rows is None else rows["text"][:] for rows in held]
    assert sorted(text for part in texts for text in part) == ["w", "x", "y", "z"]
    if partitioner == "natural_id":
        assert texts == [[], ["y"], ["x", "z", "w"]]
