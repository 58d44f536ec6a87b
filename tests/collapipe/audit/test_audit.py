"""``collapipe audit`` on tiny runs: its files, output, training data and errors."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import federated
import pytest
from full_disk import full_disk
from report_page import Page
from torch import Tensor

from collapipe.audit import attack, inverters, updates
from collapipe.audit.attack import _targets, audit
from collapipe.audit.inverters import Public
from collapipe.audit.material import Material
from collapipe.audit.result import JSON_FILE, PICTURE, read_audit
from collapipe.audit.sections import percent, recovered
from collapipe.audit.update_attacks import NUM_SIZES
from collapipe.cli.trained.audit import _write
from collapipe.config import load_overrides
from collapipe.errors import ConfigError
from collapipe.run_report.privacy import _place, privacy
from collapipe.runs.model import load_model
from collapipe.runs.reading import read_run

Command = Callable[..., tuple[int, str, str]]
POOLED = (
    *("task=classification", "data=synthetic", "decoder.mode=control_unit"),
    *("model=huggingface", "model.family=bert"),
    "model.config={hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, "
    "intermediate_size: 16}",
)
BLOCKS = 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose units send the activations of all tokens, and public rows of another seed."""
    folder = tmp_path_factory.mktemp("runs")
    rounds = "federation.rounds=1", "federation.checkpoint_every=1"
    options = *rounds, "task.validation_rows=12", f"model.num_blocks={BLOCKS}"
    federated.play(folder / "dates", *options)
    (folder / "public.txt").write_text("\n".join(sources(50)) + "\n")
    return folder


def sources(rows: int) -> list[str]:
    task: Any = load_overrides([f"task.train_rows={rows}"]).task
    return list(task.splits(5).train["source"])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverters, "_STEPS", 3)


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "dates", tmp_path / "run", symlinks=True))


def test_an_audit_is_written_printed_reported_and_reproducible(
    run: Path, runs: Path, command: Command
) -> None:
    arguments = "audit", run, "--public", runs / "public.txt", "--rows", 9
    status, out, err = command(*arguments)
    assert status == 0, err
    steps = [line.split()[0] for line in err.splitlines()]
    assert (steps.count("fitting"), steps.count("attacking")) == (2 * (BLOCKS + 1), 2 * 4)
    first, picture = (run / JSON_FILE).read_bytes(), (run / PICTURE).read_bytes()
    assert picture.startswith(b"\x89PNG")
    found = read_audit(run)
    assert found is not None
    assert (found.rows, found.public_rows, found.seed, found.sends) == (9, 50, 0, True)
    assert found.configuration == json.loads(first)["configuration"]
    assert (found.sent.blocks, found.sent.reads, found.sent.precision) == (
        BLOCKS,
        "real",
        "float32",
    )
    assert len(found.of(found.sent)) == 5
    cuts = {each.condition.blocks for each in found.recoveries}
    assert cuts == set(range(BLOCKS + 1))
    sizes = {(each.condition.rows, each.condition.steps) for each in found.updates}
    assert {(1, 1), (4, 1), (9, 1)} <= sizes and max(rows for rows, _ in sizes) == 9
    made = [(each.condition, each.rounds) for each in found.updates]
    assert len({*made}) == len(made)
    nearest = next(each for each in found.recoveries if each.attack == "nearest")
    assert (nearest.condition.blocks, nearest.all_tokens.value) == (0, 1)
    assert found.membership is not None and found.membership.rows == 12
    for word in ("int4", "noise 2", f"frozen, {BLOCKS} blocks", "membership", "in the clear"):
        assert word in out
    command(*arguments)
    assert (run / JSON_FILE).read_bytes() == first

    command("report", run)
    page = Page((run / "report.html").read_text())
    assert ["trained, int8" in row[0] for row in page.cells if row].count(True) == 1
    assert charts_of_recovery(page) == {"encoder blocks", "bits of a number", "noise"}
    bits = recovered(found, "precision", "linear", "trained")
    assert sorted(_place(each.condition, "precision") for each in bits) == [4, 6, 8, 16, 32]

    assert "This audit attacked" not in page.text
    assert command("resume", run, "federation.rounds=2")[0] == 0
    note = "This audit attacked the model after round 1, and the run has 2 rounds now"
    assert note in str(privacy(read_run(run)))
    older = {k: v for k, v in json.loads(first).items() if k != "trained_rounds"}
    (run / JSON_FILE).write_text(json.dumps(older))
    shown = str(privacy(read_run(run)))
    assert "Membership" in shown and "This audit attacked" not in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "word and each "),
        (["data.tokenizer_min_rows=3"], "word of at least 3 rows and each "),
        (["data.tokenizer=bytes", "decoder.mode=control_unit"], ""),
    ],
)
def test_counts_that_units_report_are_named(options: list[str], words: str) -> None:
    """Units report words only if the run's tokeniser is made of them."""
    sentences = _targets(load_overrides(options))
    assert f"units report how often each {words}label, if any, occurs in their rows." in sentences


def charts_of_recovery(page: Page) -> set[str]:
    """The variable of each chart of recovered tokens, such as ``noise``."""
    start = "Tokens recovered by "
    labels = [each.get("aria-label") or "" for each in page.tags("svg")]
    return {each.removeprefix(start) for each in labels if each.startswith(start)}


def test_inverters_are_fitted_on_public_rows_only(
    run: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Tensor]()
    real = inverters.linear

    def linear(public: Public, table: Tensor) -> inverters.Inverter:
        seen.extend((public.activations, public.ids, public.of))
        return real(public, table)

    monkeypatch.setattr(inverters, "linear", linear)
    monkeypatch.setattr(attack, "update_recoveries", lambda *_: iter([[]] * NUM_SIZES))
    for rows in (3, 12):
        audit(Material.of(run, (), None, runs / "public.txt", rows), trained_rounds=2)
    few, many = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert all(one.equal(other) for one, other in zip(few, many, strict=True))
    tokens = load_model(run)[2].encode(sources(50))
    ids = sorted(token for row in tokens for token in row)
    assert sorted(seen[1].tolist()) == ids


def test_a_fault_in_the_attacked_weights_ends_an_audit_before_its_slow_attacks(
    run: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: object) -> None:
        raise RuntimeError("no table")

    monkeypatch.setattr(updates, "_token_table", failing)
    monkeypatch.setattr(attack, "_by_cut", lambda *_: pytest.fail("began the slow attacks"))
    with pytest.raises(RuntimeError, match="no table"):
        audit(Material.of(run, (), None, runs / "public.txt", 3), trained_rounds=1)


@pytest.mark.thorough
def test_pooled_rows_are_attacked_and_the_output_states_that_none_are_sent(
    tmp_path: Path, command: Command
) -> None:
    run, public = tmp_path / "run", tmp_path / "public.csv"
    options = [each for each in federated.TINY if not each.startswith(("task.", "model."))]
    settings = load_overrides([*options, *POOLED, f"hydra.run.dir={run}", "federation.rounds=1"])
    federated.train(federated.grid_of(settings), settings)
    texts = settings.task.splits(7).train["text"][:60]
    public.write_text("text,other\n" + "".join(f'"{text}",1\n' for text in texts))
    status, out, _ = command("audit", run, "--public", public, "--rows", 8)
    assert status == 0
    found = read_audit(run)
    assert found is not None
    assert (found.sends, found.sent.reads, found.sent.blocks) == (False, "first", 2)
    pooled = found.of(found.sent)
    assert len(pooled) == 5
    assert all(0 < each.all_tokens.value < 1 for each in pooled if each.attack != "nearest")
    assert "server gets none" in " ".join(out.split())
    command("report", run)
    page = Page((run / "report.html").read_text())
    assert "rows sent" in charts_of_recovery(page)
    (share,) = [percent(each.all_tokens) for each in pooled if each.attack == "linear"]
    assert share in page.texts


@pytest.fixture
def _refused(run: Path, runs: Path, command: Command) -> Iterator[Callable[..., str]]:
    def refused(public: Path = runs / "public.txt") -> str:
        status, out, err = command("audit", run, "--public", public)
        assert (status, out) == (2, "")
        (line,) = err.splitlines()
        return line

    yield refused


def test_invalid_inputs_are_one_line_errors(
    run: Path, tmp_path: Path, _refused: Callable[..., str]
) -> None:
    assert "no such file" in _refused(tmp_path / "none.txt")
    (tmp_path / "blank.txt").write_text("\n \n")
    assert "no rows" in _refused(tmp_path / "blank.txt")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "no column 'source'" in _refused(tmp_path / "other.csv")
    (run / PICTURE).write_bytes(b"mine")
    assert PICTURE in _refused()
    (run / JSON_FILE).write_text("{}")
    assert JSON_FILE in _refused()
    (run / JSON_FILE).unlink()
    (run / PICTURE).unlink()
    (run / "summary.json").unlink()
    assert "collapipe resume" in _refused()


def test_a_full_disk_leaves_the_audit_before(tmp_path: Path) -> None:
    (tmp_path / JSON_FILE).write_text("before")
    with full_disk(), pytest.raises(ConfigError, match=f"{tmp_path}: cannot be written.*make room"):
        _write(tmp_path, Mock(**{"json_text.return_value": "x" * 200}))
    assert [*tmp_path.iterdir()] == [tmp_path / JSON_FILE]
    assert (tmp_path / JSON_FILE).read_text() == "before"


@pytest.mark.parametrize(
    "change", [{"seed": -1}, {"recoveries": [{}]}, {"sent": None}, {"targets": "x" * 2000}]
)
def test_an_invalid_audit_file_is_refused(
    run: Path, runs: Path, command: Command, change: dict[str, Any]
) -> None:
    (run / JSON_FILE).write_text(json.dumps({"collapipe audit": True, "version": "1"} | change))
    with pytest.raises(ConfigError, match=JSON_FILE):
        read_audit(run)
    status, _, err = command("report", run)
    assert (status, len(err.splitlines())) == (2, 1)
