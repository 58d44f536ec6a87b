"""Without a network, a hub name fails quickly, with a one-line error and without retries."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trained import of_texts

from collapipe.errors import ConfigError
from collapipe.models.huggingface import configuration
from collapipe.models.huggingface.configuration import read
from collapipe.models.huggingface.tokenizer import pretrained_tokenizer


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server that accepts connections and never replies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.parametrize(
    ("option", "ask"), [("model.name", read), ("data.tokenizer", pretrained_tokenizer)]
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
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(configuration, "_PATIENCE_S", 1.0)
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
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
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


@pytest.mark.parametrize("ask", [read, pretrained_tokenizer])
def test_a_path_without_a_folder_is_no_complaint_about_the_hub(
    ask: Callable[[str], object], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="there is no such folder") as caught:
        ask(str(tmp_path / "nosuch"))
    assert "Repo id" not in str(caught.value)
