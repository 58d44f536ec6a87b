"""Without a network, a hub name fails quickly, with a one-line error and without retries."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from datasets import load_dataset
from huggingface_hub import constants
from trained import of_texts

from collapipe import hub
from collapipe.data import hub as data_hub
from collapipe.data.hub import hub_rows
from collapipe.errors import ConfigError
from collapipe.models.huggingface import configuration
from collapipe.models.huggingface.configuration import read
from collapipe.models.huggingface.tokenizer import pretrained_tokenizer


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server that accepts connections and never replies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def let_hub_be(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


def rows(name: str) -> object:
    return hub_rows(name, None, None)


@pytest.mark.parametrize(
    ("option", "ask"),
    [("model.name", read), ("data.tokenizer", pretrained_tokenizer), ("data.name", rows)],
)
@pytest.mark.parametrize("network", ["offline", "refuses", "hangs"])
def test_an_unreachable_hub_fails_quickly_with_a_one_line_error(
    network: str,
    option: str,
    ask: Callable[[str], object],
    listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    port = listener.getsockname()[1]
    if network == "refuses":
        listener.close()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", network == "offline")
    let_hub_be(f"http://127.0.0.1:{port}", monkeypatch)
    monkeypatch.setattr(hub, "_PATIENCE_S", 0.3)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"^{option}=nosuch: ") as caught:
        ask("nosuch")
    assert time.monotonic() - began < 10  # five retries take 23 s or more
    assert str(caught.value).isprintable()
    assert ("HF_HUB_OFFLINE" if network == "offline" else str(port)) in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_without_a_network_the_cache_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    let_hub_be("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--somebody--bert"
    (model / "snapshots/abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    own = of_texts(["a hen"], 300)
    trees = {
        "config": {"model_type": "bert", "num_hidden_layers": 3, "hidden_size": 8},
        "tokenizer": json.loads(own.json_text),
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"},
    }
    for name, tree in trees.items():
        (model / f"snapshots/abc/{name}.json").write_text(json.dumps(tree))
    assert configuration.config_fields("somebody/bert").items() >= trees["config"].items()
    assert pretrained_tokenizer("somebody/bert").encode(["a hen"]) == own.encode(["a hen"])
    assert capfd.readouterr() == ("", "")


def test_without_a_network_rows_are_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_hub_be("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("text,label\na hen,1\n")
    load_dataset("csv", data_files={"train": "rows.csv"}, cache_dir="made")
    (made,) = Path("made").glob("csv/*/*/*/")
    cached = Path("somebody___reviews/default/0.0.0/abc")
    cached.parent.mkdir(parents=True)
    made.rename(cached)
    (cached / "csv-train.arrow").rename(cached / "reviews-train.arrow")
    check = data_hub._check_card

    def slowly(place: str, name: str) -> None:
        check(place, name)
        time.sleep(0.05)  # without turns, others would now store and restore what this one has set

    monkeypatch.setattr(data_hub, "_check_card", slowly)
    with ThreadPoolExecutor(4) as pool:  # as units do that share a process
        found = list(pool.map(partial(hub_rows, "somebody/reviews", None), ["label"] * 4))
    assert [each["train"]()[:] for each in found] == [{"text": ["a hen"], "label": [1]}] * 4
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("ask", [read, pretrained_tokenizer])
def test_a_path_without_a_folder_is_no_complaint_about_the_hub(
    ask: Callable[[str], object], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="there is no such folder") as caught:
        ask(str(tmp_path / "nosuch"))
    assert "Repo id" not in str(caught.value)
