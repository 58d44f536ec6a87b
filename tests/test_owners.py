"""Units train on their owners' rows; the server does not open, choose or receive these rows."""

import builtins
import io
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from federated import train, weights
from flwr.app import Context, Message
from run_files import rounds_of

from client_app.app import app
from collapipe import owner
from collapipe.cli.run import run_job
from collapipe.config import Settings, load_overrides
from collapipe.config.composing import compose
from collapipe.config.resolved import Resolved
from collapipe.credentials.credentials import request
from collapipe.credentials.keys import fingerprint
from collapipe.errors import ConfigError, OwnerError, RoundFailedError
from collapipe.flower.inline_grid import InlineGrid
from collapipe.inventory.cluster import ANY_COST as COST
from collapipe.inventory.file import read_inventory
from collapipe.runs.rows import load_rows, load_shard, make_tokenizer, report_rows
from collapipe.wire import records
from collapipe.wire.messages import LinkAddress
from server_app.units import Units

MODEL = (
    "task=classification",
    "model=huggingface",
    "model.family=bert",
    "model.config={num_hidden_layers: 2, hidden_size: 16, num_attention_heads: 2, "
    "intermediate_size: 16}",
    "federation.num_units=2",
    "federation.rounds=1",
    "task.vocabulary=280",
    "batch_size=6",
    "federation.local_steps=2",
    "federation.checkpoint_every=0",
)
ROOT = Path(__file__).parents[1]
WORDS = ["hen", "owl", "fox", "barn", "river", "grain"]


def written(file: Path, count: int, first: int = 0, label: str = "label") -> Path:
    rows = [f"the {WORDS[n % 6]} sees {WORDS[n % 5]},{'ab'[n % 2]}" for n in range(first, count)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([f"text,{label}", *rows]) + "\n")
    return file


def overrides(folder: Path, *more: str) -> list[str]:
    """Options of a server that has files for evaluation and no file for training."""
    own = [f"data.{s}_file={written(folder / f'{s}.csv', 8)}" for s in ("validation", "test")]
    return [*MODEL, *own, f"hydra.run.dir={folder / 'run'}", *more]


def grid_of(nodes: list[dict[str, Any]]) -> InlineGrid:
    """A grid whose units use these node configurations, one for each owner."""

    def client(message: Message, context: Context) -> Message:
        unit = int(context.node_config["partition-id"])
        context.node_config.update(nodes[unit])
        return app(message, context)

    return InlineGrid(client, len(nodes))  # type: ignore[arg-type]


@contextmanager
def only_units_open(*files: Path) -> Iterator[dict[str, set[str]]]:
    """Yield the names of the threads that opened each file; those of others than units fail.

    An audit hook would see more, but it remains and would see each object of all later tests.
    """
    opened = {str(file): set[str]() for file in files}

    def noting(begin: Callable[..., Any]) -> Callable[..., Any]:
        def noted(file: Any, *arguments: Any, **further: Any) -> Any:
            if str(file) in opened:
                name = threading.current_thread().name
                opened[str(file)].add(name)
                assert name.startswith("unit-"), f"{name} opens {file}"
            return begin(file, *arguments, **further)

        return noted

    with ExitStack() as stack:
        for module in builtins, io, os:
            stack.enter_context(patch.object(module, "open", noting(module.open)))
        yield opened


def test_a_federation_trains_on_rows_that_the_server_cannot_open(tmp_path: Path) -> None:
    """One owner names the rows in the node configuration, the other in an owner file. Only the
    owner's unit opens each file."""
    mine = written(tmp_path / "mine" / "rows.csv", 30)
    theirs = written(tmp_path / "theirs" / "rows.csv", 25, 5, "topic")
    file = theirs.with_name("unit.yaml")
    file.write_text("name: paris\ndata: {train_file: rows.csv, label_column: topic}\n")
    options = overrides(tmp_path)
    with only_units_open(mine, theirs) as opened:
        train(
            grid_of([{"data": str(mine), "name": "rome"}, {"owner": str(file)}]),
            load_overrides(options),
        )
        assert opened == {str(mine): {"unit-0"}, str(theirs): {"unit-1"}}
    shards = json.loads((tmp_path / "run" / "shards.json").read_text())
    assert shards["labels"] == ["a", "b"]
    assert shards["shards"] == [
        {"unit": 0, "rows": 30, "labels": {"a": 15, "b": 15}, "name": "rome"},
        {"unit": 1, "rows": 20, "labels": {"a": 10, "b": 10}, "name": "paris"},
    ]
    (line,) = rounds_of(tmp_path / "run")
    assert line["units"] == [0, 1]
    assert all(weight.isfinite().all() for weight in weights(tmp_path / "run").values())


def test_a_message_reads_the_owners_options_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message reads the options again, so that changes between messages take effect."""
    load, composed = owner.load_settings, list[str]()

    def counted(*arguments: Any) -> Settings:
        composed.append(threading.current_thread().name)
        return load(*arguments)

    def client(message: Message, context: Context) -> Message:
        composed.clear()
        context.node_config["data"] = str(mine)
        reply = app(message, context)
        kind = message.metadata.message_type
        counts.setdefault(kind, set()).add(len(composed))
        return reply

    mine, counts = written(tmp_path / "rows.csv", 30), dict[str, set[int]]()
    monkeypatch.setattr(owner, "load_settings", counted)
    options = "federation.num_units=1", "federation.rounds=2", "federation.checkpoint_every=1"
    settings = load_overrides(overrides(tmp_path, *options))
    train(InlineGrid(client, 1), settings)  # type: ignore[arg-type]
    assert counts.pop(records.FROZEN, {0}) == {0}
    assert counts == {kind: {1} for kind in counts} and counts.keys() >= {records.TRAIN}


def test_a_server_in_one_process_with_its_units_opens_no_training_rows(tmp_path: Path) -> None:
    """The partitioner runs in each unit. Owners' files with the same rows give the same model."""
    file = written(tmp_path / "rows.csv", 30)
    options = overrides(tmp_path, f"data.train_file={file}", "data.shuffle=false")
    with only_units_open(file):
        train(grid_of([{}, {}]), load_overrides(options))
    halves = [written(tmp_path / f"{n}.csv", 15 * n + 15, 15 * n) for n in (0, 1)]
    options = overrides(tmp_path / "owned", "data.shuffle=false")
    train(grid_of([{"data": str(half)} for half in halves]), load_overrides(options))
    here, there = weights(tmp_path / "run"), weights(tmp_path / "owned" / "run")
    assert [name for name in here if not torch.equal(here[name], there[name])] == []


def test_the_process_that_starts_a_simulation_opens_no_training_rows(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.csv", 30)
    options = overrides(tmp_path, f"data.train_file={file}", "runtime=simulation")
    with only_units_open(file), patch("collapipe.cli.simulation.run_simulation") as started:
        run_job(options)
    assert started.called


def test_a_server_without_evaluation_files_opens_no_training_rows(tmp_path: Path) -> None:
    """The units hold out some of their training rows."""
    file = written(tmp_path / "rows.csv", 60)
    options = [*MODEL, f"data.train_file={file}", f"hydra.run.dir={tmp_path / 'run'}"]
    with only_units_open(file):
        train(grid_of([{}, {}]), load_overrides(options))
    (line,) = rounds_of(tmp_path / "run")
    assert line["on_units"]["rows"] == {"0": 3, "1": 3}
    planned = [*options[:-1], f"hydra.run.dir={tmp_path / 'planned'}", "framework.train=false"]
    with patch("server_app.training.load_server_rows") as opened:  # units may have cached the file
        train(grid_of([{}, {}]), load_overrides(planned))
    assert not opened.called
    with pytest.raises(ConfigError, match=r"data\.validation_file is not set.*where=units"):
        load_overrides([*options, "evaluation.where=server"])


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ("data.train_file=/etc/passwd", "data.train_file is the owner's"),
        ("data.name=someone/rows", "data.name is the owner's"),
        ("data=synthetic", "data.synthetic is the owner's"),
        ("data.max_train_samples=1", "data.max_train_samples is"),
        ("data.label_column=secret", "data.label_column is the owner's"),
        ("+data.own=1", "data.own is the owner's"),
        ("partitioner=dirichlet", "data.partitioner is the owner's"),
        ("data.partitioner=null", "data.partitioner is the owner's"),
        ("data.partitioner._target_=os.system", "data.partitioner is the owner's"),
        ("task.root=/secret", "task.root names rows"),
        ("data.root=/rows; task.root=/secret", "task.root names rows"),
        ("task.synthetic=true", "task.synthetic names rows"),
        ("model.name=/secret", "model.name must be a hub's id"),
        ("model.name=tests", "model.name must be a hub's id"),
        ("model={_target_: secret.Class}", "model._target_ names a class"),
        ("strategy._target_=os.system", "strategy._target_ names a class"),
        ("+strategy.inner={_target_: os.system}", "strategy.inner._target_ names a class"),
        ("task._target_=collapipe.inventory.cluster.DeviceCluster", "task._target_ names a class"),
        ("cluster=file; cluster.file=/secret", "cluster names a file"),
        ("cluster='devices'; cluster.file=/secret", "cluster names a file"),
        ("+cluster.file=/secret", "cluster names a file"),
        ("channel={_target_: secret.Class}", "channel._target_ names a class"),
        ("+model.sizes=[{inner: {_target_: os.system}}]", "model.sizes.inner._target_ names a"),
        ("+own={file: /secret}", "own is no section"),
        ("~tracking", "tracking is no section"),
        ("decoder=3", "decoder is no section"),
    ],
)
def test_an_option_that_belongs_to_the_owner_is_refused_without_its_value(
    tmp_path: Path, option: str, word: str
) -> None:
    file = written(tmp_path / "mine.csv", 9)
    text = compose([*overrides(tmp_path), *option.split("; ")]).text
    with pytest.raises(OwnerError) as refused:
        owner.load_settings(text, {"data": str(file)})
    assert word in str(refused.value)
    assert "secret" not in str(refused.value).lower()
    assert "passwd" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "dialled"),
    [
        ("edge.example:8001", True),
        ("10.0.0.1:22", False),
        ("unix:/var/run/secret.sock", False),
        ("dns://10.0.0.1/edge.example:8001", False),
        ("edge.example:8001,10.0.0.1:22", False),
        ("edge.example:/secret", False),
    ],
)
def test_a_unit_connects_only_to_its_owners_server(
    address: str, dialled: bool, tmp_path: Path
) -> None:
    file = tmp_path / "unit.yaml"
    file.write_text("server: edge.example:8000\ndata: {train_file: rows.csv}\n")
    refused = pytest.raises(OwnerError, match=r"link\.advertise is another host")
    link = LinkAddress(address, b"pem", "name", b"key", b"own", "token")
    with nullcontext() if dialled else refused:
        assert owner.trusted_link(link, {"owner": str(file)}) == link
    assert owner.trusted_link(link, {"data": "rows.csv"}) == link  # this owner names no server


def test_a_unit_with_credentials_trusts_only_its_authority(tmp_path: Path) -> None:
    """An address that the server sends with another certificate is refused."""
    file = tmp_path / "unit.yaml"
    server = "server: '[2001:db8::1]:8000'\ncredentials: own\n"
    file.write_text(server + "data: {train_file: rows.csv}\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "authority.pem").write_bytes(b"authority")
    address = LinkAddress("[2001:db8::1]:8001", b"", "", b"key", b"own", "token")
    trusted = owner.trusted_link(address, {"owner": str(file)})
    assert trusted == replace(address, server_certificate=b"authority", server_name="2001:db8::1")
    with pytest.raises(OwnerError, match="authority"):
        owner.trusted_link(replace(address, server_certificate=b"pem"), {"owner": str(file)})


def test_units_refuse_a_server_with_a_training_file_before_it_opens_the_file(
    tmp_path: Path,
) -> None:
    """Without evaluation files, the server would open the training file; units refuse it first."""
    file = written(tmp_path / "rows.csv", 40)
    options = [*MODEL, f"data.train_file={file}", f"hydra.run.dir={tmp_path / 'run'}"]
    nodes = [{"data": str(written(tmp_path / f"{unit}.csv", 9))} for unit in (0, 1)]
    with only_units_open(file) as opened:
        with pytest.raises(RoundFailedError, match=r"data\.train_file is the owner's choice"):
            train(grid_of(nodes), load_overrides(options))
        assert opened == {str(file): set()}


CLUSTER = """
batch_size: 6
model: {num_blocks: 2}
clusters:
- name: mine
  devices:
  - {name: box, chunk: {u: 0.1}, max_blocks: 4}
"""


@pytest.mark.parametrize(
    ("options", "size", "sends_words"),
    [
        (["data.tokenizer=federated"], 280, True),
        ([], 280, True),
        (["data.tokenizer=bytes"], 259, False),
    ],
    ids=["federated", "null", "bytes"],
)
def test_a_run_without_a_given_tokeniser_makes_one(
    tmp_path: Path, options: list[str], size: int, sends_words: bool
) -> None:
    """The tokeniser has the words that units report, or bytes, for which units report no words."""
    mine = written(tmp_path / "mine.csv", 30)
    run = overrides(tmp_path, *options)
    node = {"owner": str(tmp_path / "unit.yaml")}
    (tmp_path / "unit.yaml").write_text(f"data: {{train_file: {mine.name}}}\n")
    settings = owner.load_settings(load_overrides(run).text, node)
    answer = report_rows(settings, 0)
    assert bool(answer.words) == sends_words
    tokenizer = make_tokenizer(load_overrides(run), [answer])
    assert tokenizer.vocabulary.size == size
    assert tokenizer.labels == ("a", "b")


def test_a_run_with_measured_radio_uses_the_owners_uplink(tmp_path: Path) -> None:
    """The server's file describes the channels; a unit opens no file that the server names."""
    written(tmp_path / "mine.csv", 9)
    joint = (ROOT / "docs" / "examples" / "joint-round.yaml").read_text()
    (tmp_path / "boxes.yaml").write_text(joint)
    (tmp_path / "servers.yaml").write_text(joint)
    file = tmp_path / "unit.yaml"
    file.write_text("data: {train_file: mine.csv}\ncluster: {file: boxes.yaml}\n")
    radio = "channel=file", f"channel.file={tmp_path / 'servers.yaml'}"
    run = load_overrides(overrides(tmp_path, *radio)).text
    with only_units_open(tmp_path / "servers.yaml"):
        uplink = owner.load_settings(run, {"owner": str(file)}).channel.draw_uplink(
            1.0, 1.0, np.random.default_rng(0)
        )
    inventory = read_inventory(tmp_path / "boxes.yaml")
    assert uplink.gains == inventory.uplinks[0].gains
    with pytest.raises(OwnerError, match="its option channel needs an inventory"):
        owner.load_settings(run, {"data": str(tmp_path / "mine.csv")})


def test_an_owner_file_sets_the_units_devices_and_threads(tmp_path: Path) -> None:
    """The inventory's only cluster belongs to the unit, although the unit's number is 1."""
    written(tmp_path / "mine.csv", 9)
    (tmp_path / "boxes.yaml").write_text(CLUSTER)
    file = tmp_path / "unit.yaml"
    file.write_text(
        "data: {train_file: mine.csv, max_train_samples: 7, tokenizer_min_rows: 2}\n"
        "cluster: {file: boxes.yaml}\npipeline: {threads: 2}\nruntime: {torch_device: cpu}\n"
    )
    options = overrides(tmp_path, "cluster=edge", "cluster.num_devices=5", "pipeline.threads=8")
    node, run = {"owner": str(file)}, [*options, "data.tokenizer_min_rows=3"]
    settings = owner.load_settings(load_overrides(run).text, node)
    assert (settings.pipeline.threads, settings.data.validation_file) == (2, None)
    assert len(load_shard(settings, 1)) == 7
    (tmp_path / "plain.yaml").write_text("data: {train_file: mine.csv}\n")
    text = load_overrides(run).text
    plain = owner.load_settings(text, {"owner": f"{tmp_path}/plain.yaml"})
    assert plain.pipeline.threads == 1  # not the server's 8
    cluster = settings.build("cluster")
    assert [each.name for each in cluster.draw(COST, 1, np.random.default_rng(0))] == ["box"]
    with pytest.raises(OwnerError, match=r"tokenizer_min_rows must be at least 2"):
        owner.load_settings(load_overrides(options).text, node)


PROMISES = (
    "decoder.mode=control_unit",
    "federation.weighting=uniform",
    "federation.max_update_norm=null",
    "privacy.clip_norm=1",
    "privacy.secure_aggregation=true",
    "privacy.noise_by=units",
    "privacy.noise_multiplier=4",
)


@pytest.mark.parametrize(
    ("less", "words"),
    [
        ((), None),
        (("privacy.noise_multiplier=3.9",), "noise_multiplier must be at least 4"),
        (("privacy.noise_seed=1",), "noise_seed must be null"),
        (("privacy.noise_by=server",), "noise_by must be units"),
        (
            ("privacy.noise_by=server", "privacy.secure_aggregation=false"),
            "secure_aggregation must be true",
        ),
        (
            (
                *("privacy.noise_by=server", "privacy.secure_aggregation=false"),
                *("privacy.noise_multiplier=0", "privacy.clip_norm=null"),
                "decoder.mode=per_cluster",
            ),
            "decoder.mode must be control_unit",
        ),
    ],
)
def test_an_owner_file_can_require_privacy_options(
    tmp_path: Path, less: tuple[str, ...], words: str | None
) -> None:
    written(tmp_path / "mine.csv", 9)
    file = tmp_path / "unit.yaml"
    file.write_text(
        "data: {train_file: mine.csv}\n"
        "privacy: {updates_only: true, secure_aggregation: true, noise_multiplier: 4}\n"
    )
    run = load_overrides([*overrides(tmp_path), *PROMISES, *less]).text
    if words is None:
        assert owner.load_settings(run, {"owner": str(file)}).privacy.noise_multiplier == 4
    else:
        with pytest.raises(OwnerError, match=words):
            owner.load_settings(run, {"owner": str(file)})


@pytest.mark.parametrize("stranger", [False, True])
def test_units_join_a_sum_only_with_the_peers_that_their_owners_list(
    tmp_path: Path, stranger: bool
) -> None:
    names = ["berlin", "paris", "rome"]
    keys = [request(tmp_path / name, name).public_key for name in names]
    known = [fingerprint(key) for key in keys[: 2 if stranger else 3]]
    for name in names:
        written(tmp_path / f"{name}.csv", 20)
        (tmp_path / f"{name}.yaml").write_text(
            f"name: {name}\ncredentials: {name}\ndata: {{train_file: {name}.csv}}\n"
            f"privacy: {{peers: {json.dumps(known)}}}\n"
        )
    options = overrides(tmp_path, *PROMISES, "federation.num_units=3")
    nodes = [{"owner": str(tmp_path / f"{name}.yaml")} for name in names]
    train(grid_of(nodes), load_overrides(options))
    (line,) = rounds_of(tmp_path / "run")
    assert line["units"] == ([0, 1] if stranger else [0, 1, 2])
    why = "WireError: is not listed in privacy.peers of the owners' files of berlin, paris"
    assert line["failures"] == ({"2": why} if stranger else {})
    plain = load_overrides(overrides(tmp_path)).text
    with pytest.raises(OwnerError, match="secure_aggregation must be true"):
        owner.load_settings(plain, nodes[0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "data: {train_file: rows.csv}\nprivacy: {peers: [594f]}\n",
            "unit.yaml:2: privacy.peers",
        ),
        (
            "data: {train_file: rows.csv}\n"
            "privacy: {peers: [594f e48d 03d3 4ed1 490f 36f8 8d6f 9d25]}\n",
            "needs credentials",
        ),
        (
            "data: {text_column: body}\n",
            "unit.yaml:1: data: needs one of train_file",
        ),
        ("data: {train_file: a, root: b}\n", "needs one of"),
        ("data: {trian_file: a}\n", "unknown key; nearest: train_file"),
        ("data: {root: a, test_file: b}\n", "belong to a train_file"),
        ("{}\n", "data: is missing"),
        ("data: {train_file: absent.csv}\n", "absent.csv: no such file"),
    ],
)
def test_an_error_in_an_owner_file_is_shown_only_to_the_owner(
    tmp_path: Path, text: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server learns that the unit is excluded, but nothing about the file."""
    file = tmp_path / "secret" / "unit.yaml"
    file.parent.mkdir()
    file.write_text(text)
    options = overrides(tmp_path)
    grid = grid_of([{"owner": str(file)}] * 2)
    with pytest.raises(RoundFailedError) as failed, caplog.at_level(logging.ERROR):
        Units(grid, load_overrides(options)).rows()
    assert words in caplog.text
    assert "cannot use what its owner gave it" in str(failed.value)
    assert "secret" not in str(failed.value)
    assert "file" not in str(failed.value)


@pytest.mark.parametrize(
    ("rows", "words", "expected"),
    [
        ("body,label\nhen,a\n", "there is no column 'text'", "no column that data.text_column"),
        ("text,label\nhen,\n", "column 'label', row 1: is empty", "a label of its rows"),
        ("text,label\n\xff\xfe", "is not UTF-8", "its rows cannot be read"),
    ],
)
def test_an_error_in_rows_is_reported_to_the_server_without_values(
    tmp_path: Path, rows: str, words: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The unit is excluded and logged; the other unit stays."""
    bad = tmp_path / "secret.csv"
    bad.write_bytes(rows.encode("latin-1"))
    run = overrides(tmp_path)
    grid = grid_of([{"data": str(written(tmp_path / "mine.csv", 9))}, {"data": str(bad)}])
    with caplog.at_level(logging.WARNING, "client_app"), caplog.at_level(logging.WARNING):
        units = Units(grid, load_overrides(run))
        assert list(units.rows()) == [0]
    whole, hidden = ([r.getMessage() for r in caplog.records if r.name == name] for name in LOGS)
    assert words in whole[0]
    assert "secret" in whole[0]
    assert expected in hidden[0]
    assert "secret" not in hidden[0]


LOGS = "collapipe.owner", "server_app.exclusions"


def test_a_label_that_the_run_does_not_list_excludes_its_unit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The owner's log names the label; the server's log only says that an unlisted label exists.
    The other unit trains with the listed labels."""
    mine, theirs = written(tmp_path / "mine.csv", 20), tmp_path / "theirs.csv"
    theirs.write_text("text,label\n" + "the hen,a\nthe owl,secret\n" * 6)
    options = overrides(tmp_path, "task.labels=[a,b,c]")
    with caplog.at_level(logging.WARNING):
        train(grid_of([{"data": str(mine)}, {"data": str(theirs)}]), load_overrides(options))
    whole, hidden = ([r.getMessage() for r in caplog.records if r.name == name] for name in LOGS)
    assert any("'secret', which task.labels does not list (a, b, c)" in line for line in whole)
    assert any("a label that task.labels does not list" in line for line in hidden)
    assert not any("secret" in line for line in hidden)
    shards = json.loads((tmp_path / "run" / "shards.json").read_text())
    assert (shards["labels"], len(shards["shards"])) == (["a", "b", "c"], 1)


def test_units_evaluate_on_rows_that_their_owners_hold_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server does not open the owners' files and needs no evaluation files. A unit without
    held-out rows adds nothing to the metric."""
    mine, held = written(tmp_path / "rows.csv", 30), written(tmp_path / "held.csv", 7)
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(
            "data: {train_file: rows.csv, validation_file: held.csv, test_file: held.csv}\n"
        )
    theirs = written(tmp_path / "theirs.csv", 12)
    options = [*MODEL, f"hydra.run.dir={tmp_path / 'run'}", "evaluation.where=units"]
    options += ["federation.num_units=4", "data.max_eval_samples=5"]
    nodes = [{"owner": str(tmp_path / f"{name}.yaml")} for name in ("one", "two")]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "labels.txt").write_text("a\nb\n")
    (tmp_path / "folder" / "train.tsv").write_text("the hen\t0\nthe owl\t1\n" * 5)
    nodes += [{"data": str(theirs)}, {"data": str(tmp_path / "folder")}]
    with only_units_open(mine, held, theirs) as opened:
        train(grid_of(nodes), load_overrides(options))
        # both units name this file; the second unit may read a cached copy
        assert opened[str(held)] and opened[str(held)] <= {"unit-0", "unit-1"}
    (line,) = rounds_of(tmp_path / "run")
    assert line["on_units"]["rows"] == {"0": 5, "1": 5, "2": 0, "3": 0}
    assert "no rows to evaluate on: unit 2" in " ".join(capsys.readouterr().out.split())


def test_an_error_in_held_out_rows_is_shown_to_their_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server learns only that an unknown label exists, and evaluates without the unit."""
    written(tmp_path / "rows.csv", 30)
    (tmp_path / "held.csv").write_text("text,label\nthe hen,secret\n")
    (tmp_path / "unit.yaml").write_text(
        "data: {train_file: rows.csv, validation_file: held.csv, test_file: held.csv}\n"
    )
    options = overrides(tmp_path, "evaluation.where=both")
    nodes = [{"owner": str(tmp_path / "unit.yaml")}, {"data": str(tmp_path / "rows.csv")}]
    with caplog.at_level(logging.INFO):
        train(grid_of(nodes), load_overrides(options))
    (line,) = rounds_of(tmp_path / "run")
    on_units = line["on_units"]
    assert (on_units["rows"], on_units["loss"]) == ({"1": 0}, None)
    assert "a label that the run does not know" in on_units["failures"]["0"]
    assert "secret" not in line
    assert any("'secret'" in record.getMessage() for record in caplog.records)


def test_an_unexpected_error_reveals_no_values(tmp_path: Path) -> None:
    """A library's error message may contain values of rows."""
    with pytest.raises(OwnerError) as raised:
        raise owner.error_for_server(KeyError("secret row"), {"data": "/secret"})
    assert "secret" not in str(raised.value)
    assert isinstance(owner.error_for_server(KeyError("a"), {}), KeyError)


def test_a_server_without_evaluation_rows_names_the_missing_files(tmp_path: Path) -> None:
    """The server does not use rows of the units instead."""
    settings = load_overrides([*MODEL, f"hydra.run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match="no rows"):
        load_rows(settings, "test")
    one = f"data.test_file={written(tmp_path / 'test.csv', 4)}"
    with pytest.raises(ConfigError, match="set both"):
        load_overrides([*MODEL, one])


def test_owners_know_every_section_of_the_options() -> None:
    """Otherwise every owner would refuse every run."""
    of_all = {each.name for each in fields(Settings)} - {each.name for each in fields(Resolved)}
    plugins = {*owner._PLUGINS} - {"partitioner"}  # part of the section data
    assert {*owner._SECTIONS.split(), *owner._NUMBERS} == of_all | plugins
