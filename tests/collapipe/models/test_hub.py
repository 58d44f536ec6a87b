"""A model by a hub's name without a network: one line, soon, and no retries."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from collapipe.errors import ConfigError
from collapipe.models.huggingface import configuration
from collapipe.models.huggingface.configuration import read


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Somebody who takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.parametrize("network", ["offline", "refuses", "hangs"])
def test_a_hub_that_cannot_be_asked_is_one_line_soon(
    network: str,
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
    with pytest.raises(ConfigError, match=r"^model\.name=nosuch: ") as caught:
        read("nosuch")
    assert time.monotonic() - began < 10  # five retries take 23 s or more
    assert str(caught.value).isprintable()
    assert ("HF_HUB_OFFLINE" if network == "offline" else str(port)) in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_without_a_network_the_cache_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--somebody--bert"
    (model / "snapshots/abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    sizes = {"model_type": "bert", "num_hidden_layers": 3, "hidden_size": 8}
    (model / "snapshots/abc/config.json").write_text(json.dumps(sizes))
    assert configuration.config_fields("somebody/bert").items() >= sizes.items()
