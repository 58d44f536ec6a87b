"""A device name stands for a device that torch finds; other names are errors."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from federated import TINY, run
from second_device import ran, second_device

import collapipe
from collapipe import config
from collapipe.config import load_overrides
from collapipe.errors import ConfigError
from collapipe.process.torch_device import present, torch_device, torch_for_a_run, use_threads

Command = Callable[..., tuple[int, str, str]]
GPUS, MAC, PLAIN = ["cuda:0", "cuda:1", "cpu"], ["mps", "cpu"], ["cpu"]


def named(name: str, devices: list[str], dtype: str = "float32") -> str:
    """The device that a name means if ``devices`` are present."""
    with patch("collapipe.process.torch_device.present", lambda: devices):
        return str(torch_device("server.torch_device", name, dtype))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["federation.num_units=1"], 4),  # the head on the server gets the other cores
        (["federation.num_units=1", "decoder.mode=control_unit"], 8),
        (["federation.num_units=1", "framework=vanilla_fl"], 8),
        (["federation.num_units=3"], 2),
        (["federation.num_units=20"], 1),
        (["federation.num_units=3", "pipeline.threads=5"], 5),
    ],
)
def test_parts_that_compute_at_once_share_the_cores_by_default(
    options: list[str], expected: int
) -> None:
    settings = load_overrides(options)
    with (
        patch("collapipe.process.torch_device._CORES", 8),
        patch("torch.set_num_threads") as chosen,
    ):
        use_threads(settings.pipeline.threads, settings.computing_at_once)
    chosen.assert_called_once_with(expected)


@pytest.mark.parametrize(
    ("name", "devices", "meant"),
    [
        ("auto", GPUS, "cuda:0"),
        ("auto", MAC, "mps"),
        ("auto", PLAIN, "cpu"),
        ("cuda", GPUS, "cuda:0"),
        ("cuda:1", GPUS, "cuda:1"),
        ("mps", MAC, "mps"),
        ("cpu", GPUS, "cpu"),
    ],
)
def test_a_name_means_a_present_device(name: str, devices: list[str], meant: str) -> None:
    assert named(name, devices) == meant


@pytest.mark.parametrize(
    ("name", "devices"),
    [("cuda", PLAIN), ("cuda:2", GPUS), ("mps", GPUS), ("cuda:0", MAC), ("cuda:" + 30 * "9", GPUS)],
)
def test_the_error_for_a_missing_device_lists_the_present_ones(
    name: str, devices: list[str]
) -> None:
    with pytest.raises(ConfigError, match=f"^server.torch_device={name}: .*{', '.join(devices)}"):
        named(name, devices)


def test_mps_has_no_float64() -> None:
    assert named("auto", GPUS, "float64") == "cuda:0"
    for name in ("mps", "auto"):
        with pytest.raises(ConfigError, match=rf"={name}: .*pipeline\.dtype=float32"):
            named(name, MAC, "float64")


@pytest.mark.parametrize(
    ("cuda", "count", "mps"), [(False, 2, False), (True, 2, False), (False, 0, True)]
)
def test_present_devices_are_those_that_torch_reports(cuda: bool, count: int, mps: bool) -> None:
    with (
        patch.object(torch.cuda, "is_available", lambda: cuda),
        patch.object(torch.cuda, "device_count", lambda: count),
        patch.object(torch.backends.mps, "is_available", lambda: mps),
    ):
        assert present() == (GPUS if cuda else MAC if mps else PLAIN)


@pytest.mark.parametrize("option", ["runtime.torch_device", "server.torch_device"])
@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "", "null", "0"])
def test_invalid_names_are_refused(option: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{option}="):
        config.load_overrides([f"{option}={name}"])


def test_units_and_the_server_have_separate_options() -> None:
    """Each option is checked only when used: a server need not have its units' devices."""
    settings = config.load_overrides(["runtime.torch_device=cuda:1", "pipeline.dtype=float64"])
    with patch("collapipe.process.torch_device.present", lambda: GPUS):
        assert (str(settings.unit_device), str(settings.server_device)) == ("cuda:1", "cpu")
    with patch("collapipe.process.torch_device.present", lambda: PLAIN):
        assert str(settings.server_device) == "cpu"
        with pytest.raises(ConfigError, match=r"^runtime\.torch_device=cuda:1"):
            _ = settings.unit_device


@pytest.mark.parametrize("options", [["-m", "seed=0,1"], []], ids=["sweep", "run"])
@pytest.mark.parametrize("option", ["runtime.torch_device", "server.torch_device"])
def test_a_run_without_its_device_fails_before_it_writes_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    option: str,
    options: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with patch("collapipe.process.torch_device.present", lambda: PLAIN):
        status, _, error = command("run", f"{option}=cuda", *options)
    assert (status, f"{option}=cuda" in error) == (2, True)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


@pytest.mark.thorough
def test_predictions_run_on_the_servers_device_or_on_the_chosen_one(
    tmp_path: Path, command: Command
) -> None:
    option, cases = "--torch-device", {"": True, "cpu": False, "auto": True}
    with second_device():
        run(tmp_path, "federation.num_units=1", "task.train_rows=12", "server.torch_device=auto")
        answers = set()
        for name, expected in cases.items():
            ran.clear()
            chosen = [option, name] if name else []
            status, answer, _ = command("predict", tmp_path, "3 May 2020", "--scores", *chosen)
            assert (status, "argmax" in ran) == (0, expected)
            answers.add(answer)
        status, _, error = command("predict", tmp_path, "3 May 2020", option, "cuda:9")
    assert len(answers) == 1
    assert (status, f"{option}=cuda:9" in error) == (2, True)


def test_a_run_ignores_what_the_program_has_set_in_torch_and_restores_it() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu"):
            with torch_for_a_run():
                torch.set_num_threads(1)
                weight = torch.ones(2, 2, requires_grad=True)
                product = weight @ weight
                assert (str(product.device), product.dtype) == ("cpu", torch.float32)
                assert product.requires_grad and not product.is_inference()
            assert torch.get_num_threads() == threads + 1
            assert torch.ones(1).device.type == "meta" and torch.ones(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)


def test_a_second_run_in_another_thread_of_the_process_is_refused(tmp_path: Path) -> None:
    """Both would seed torch's generator, and train other weights than alone."""
    with torch_for_a_run(), ThreadPoolExecutor() as pool:
        second = pool.submit(collapipe.train, [*TINY, f"hydra.run.dir={tmp_path}"])
        with pytest.raises(ConfigError, match="another thread of this process trains"):
            second.result()
    assert not any(tmp_path.iterdir())
