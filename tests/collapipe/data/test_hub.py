"""Loading ``data.name`` runs no code from pickles, templates or named builders."""

import io
import json
import pickle
import tarfile
from pathlib import Path

import pytest
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

from collapipe.cli import run
from collapipe.config import Settings, load_overrides
from collapipe.config.resolved import value_at
from collapipe.data.sources import read
from collapipe.errors import ConfigError, DataError
from collapipe.runs.rows import load_held_out, load_server_rows
from collapipe.sections import DataSettings


class Payload:
    """Unpickling it creates ``ran`` in the current folder."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("open('ran', 'w').close()",)


PICKLE = pickle.dumps(Payload())
TEMPLATE = "{{ cycler.__init__.__globals__.os.mkdir('ran') }}"  # for Jinja


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with pickles under each name that a library might search for."""
    here = tmp_path / "here"
    for folder in (here, here / "rows"):
        plant(folder)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return here


def plant(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("train.pkl", "train.pickle", "train.npy"):
        (folder / name).write_bytes(PICKLE)
    with tarfile.open(folder / "train.tar", "w") as archive:
        for name in ("0.pkl", "0.pyd", "0.pth", "0.npy"):
            member = tarfile.TarInfo(name)
            member.size = len(PICKLE)
            archive.addfile(member, io.BytesIO(PICKLE))


def refused(name: str, config: str | None = None, message: str = "") -> None:
    with pytest.raises(ConfigError, match=rf"data\.name=.*{message}") as caught:
        read(DataSettings(name=name, config=config), ("text",), 0)
    assert "\n" not in str(caught.value)
    assert not Path("ran").exists()


@pytest.mark.parametrize("config", [None, "default"])
@pytest.mark.parametrize("name", sorted(_PACKAGED_DATASETS_MODULES))
def test_packaged_builders_cannot_be_selected_by_name(
    here: Path, name: str, config: str | None
) -> None:
    refused(name, config)
    refused(f"hf://datasets/{name}", config)
    plant(here / name)
    refused(name, config)
    refused(f"./{name}", config)


@pytest.mark.parametrize(
    "name", ["..", "a/b/c", "/none", "buckets/a", "hf://datasets/a/b", "a::b", "https://a/b"]
)
def test_names_other_than_hub_ids_and_folders_are_refused(here: Path, name: str) -> None:
    refused(name)


def test_a_folder_with_too_many_files_is_not_searched(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searching a folder such as ``/`` would take hours."""
    monkeypatch.setattr("collapipe.data.hub._MOST_FILES", 10)
    monkeypatch.setattr("collapipe.data.hub.load_dataset_builder", lambda *rest: pytest.fail())
    refused("..")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("train.pkl", "train.pkl"),
        ("train.tar", "train.tar"),
        ("train.csv", "train.pkl"),
        ("rows.py", None),
        ("train.csv", None),
    ],
)
def test_a_folder_with_pickles_archives_or_scripts_is_not_loaded(
    here: Path, name: str, source: str | None
) -> None:
    """The folder contains a link to ``source``, or a pickle with another suffix."""
    folder = here / "only"
    folder.mkdir()
    if source:
        (folder / name).symlink_to(here / source)
    else:
        (folder / name).write_bytes(PICKLE)
    refused("only")


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "option",
    ["data_files: {}", "data_dir: {}", "data_files: [{{split: train, path: [a, {}]}}]", "{}: a"],
)
def test_a_dataset_card_that_names_another_file_system_is_refused(
    here: Path, file: str, option: str
) -> None:
    """``reference://`` would render a Jinja template, which can run any code."""
    folder = here / "card"
    folder.mkdir()
    (folder / "train.csv").write_text("text\na\n")
    gen = [{"key": TEMPLATE, "url": "a", "dimensions": {"i": {"stop": 1}}}]
    index = here / "index.json"
    index.write_text(json.dumps({"version": 1, "gen": gen}))
    url = f'"reference://*.csv::file://{index}"'
    configs = f"configs:\n- config_name: a\n  {option.format(url)}\n"
    (folder / file).write_text(f"---\n{configs}---\n" if file.endswith("md") else configs)
    refused("card", message=f"its {file} names 'reference://")
    refused("card", "a", message=f"its {file} names 'reference://")


def test_a_folder_of_rows_is_loaded(here: Path) -> None:
    """A path may end in the name of a builder; a dataset card may name the folder's own files."""
    for name in ("mine", "pandas"):
        folder = here / name
        folder.mkdir()
        rows = "".join(f"{number}\n" for number in range(30))
        (folder / "learn.csv").write_text(f"text\n{rows}")
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: a\n  data_files:\n  - split: train\n"
            "    path: learn.csv\n---\n"
        )
        splits = read(DataSettings(name=f"./{name}", config="a"), ("text",), 0)
        assert len(splits.train) == 24


def a_dataset(folder: Path, *splits: str) -> Path:
    """A folder laid out like a dataset of the hub, with thirty rows per split."""
    folder.mkdir()
    rows = "".join(f"row {number},{'ab'[number % 2]}\n" for number in range(30))
    for split in splits:
        (folder / f"{split}.csv").write_text(f"text,label\n{rows}")
    return folder


def test_evaluation_rows_are_opened_without_the_training_rows(here: Path) -> None:
    data = DataSettings(name=str(a_dataset(here / "mine", "train", "validation", "test")))
    assert len(read(data, ("text", "label"), 0).train) == 30
    (trained_on,) = (here.parent / "cache").rglob("*-train.arrow")
    trained_on.unlink()
    left = read(data, ("text", "label"), 0)
    assert [len(left.validation), len(left.test)] == [30, 30]
    with pytest.raises(DataError, match=r"data\.name="):
        _ = left.train


@pytest.mark.parametrize(
    ("splits", "where"), [(("validation", "test"), "auto"), (("test",), "units"), ((), "units")]
)
def test_units_evaluate_if_the_dataset_lacks_a_validation_split(
    here: Path, monkeypatch: pytest.MonkeyPatch, splits: tuple[str, ...], where: str
) -> None:
    """Without that split, the run starts with ``evaluation.where=units``. If a user sets
    ``evaluation.where=server``, the server fails and does not evaluate on training rows.
    """
    started = list[Settings]()
    monkeypatch.setattr(run, "start", started.append)
    name = a_dataset(here / "mine", "train", *splits)
    options = [
        *("task=classification", "model=huggingface", "model.family=bert", f"data.name={name}"),
        *("federation.num_units=2", f"hydra.run.dir={here / 'run'}"),
    ]
    run.run_job(options)
    (settings,) = started
    assert settings.tree["evaluation"]["where"] == where
    assert load_overrides(settings.overrides).evaluation == settings.evaluation
    on_server = load_overrides([*options, "evaluation.where=server"])
    if where == "units":
        held = [load_held_out(settings, unit, "validation") for unit in range(2)]
        assert [len(each) for each in held if each is not None] == [2, 1]
        with pytest.raises(DataError, match=r"data\.name=.*evaluation\.where=units"):
            load_server_rows(on_server)
    else:
        assert [len(rows) for rows in load_server_rows(on_server).values()] == [30, 30]


def test_a_relative_data_folder_is_made_absolute(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of a simulation and a resumed run can have another current folder."""
    started = list[Settings]()
    monkeypatch.setattr(run, "start", started.append)
    folder = a_dataset(here / "mine", "train", "validation", "test")
    options = ["task=classification", "model=huggingface", "model.family=bert", "data.name=./mine"]
    run.run_job([*options, f"hydra.run.dir={here / 'run'}"])
    assert [each.data.name for each in started] == [str(folder.resolve())]


@pytest.mark.parametrize("option", ["data.root", "task.root"])
def test_a_relative_root_is_made_absolute(
    here: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    started = list[Settings]()
    monkeypatch.setattr(run, "start", started.append)
    (folder := (here / "mine").resolve()).mkdir()
    options = ["task=classification", "model=huggingface", "model.family=bert", f"{option}=mine"]
    run.run_job([*options, f"hydra.run.dir={here / 'run'}"])
    assert [value_at(each.tree, "task.root") for each in started] == [str(folder)]
