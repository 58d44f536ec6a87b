"""``collapipe device``: invalid options, log lines, signals and exit statuses."""

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from device_cluster import Result, Work, daemons, device_name, plan_of
from device_process import COMMAND, device_process

from collapipe.cli.device import command as device
from collapipe.credentials.authority import CONTROL_UNIT, temporary_authority

Command = Callable[..., tuple[int, str, str]]
# A daemon whose forward passes take longer than gRPC waits for its streams on shutdown.
SLOW = f"""\
import time
from pipeline.stage import SegmentStage
forward = SegmentStage.forward
def slow(*arguments):
    print("begun", flush=True)
    time.sleep(4)
    made = forward(*arguments)
    print("done", flush=True)
    return made
SegmentStage.forward = slow
{COMMAND}"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--credentials DIR is missing"),
        (["--insecure", "--log-format", "xml"], "--log-format xml: must be plain or json"),
        (["--insecure", "--model", "./no/model"], "--model ./no/model: no such folder, and no hub"),
        (["--insecure", "--memory", "3x"], "--memory 3x: expected a number"),
        (["--insecure", "--memory", "0GB"], "--memory 0GB: expected a number"),
        (["--insecure", "--memory", "²GB"], "--memory ²GB: expected a number"),
        (["--insecure", "--memory", "3"], "--memory 3: expected a number with MB or GB"),
        (["--insecure", "--listen", "127.0.0.1:99999"], "--listen: address '127.0.0.1:99999'"),
        (["--insecure", "--listen", "127.0.0.1:"], "must be HOST:PORT, such as 10.0.0.5:7700"),
        (["--insecure", "--listen", "127.0.0.1"], "must be HOST:PORT, such as 10.0.0.5:7700"),
        (["--insecure", "--credentials", "own"], "leave one out"),
        *(
            (["--insecure", "--name", name], "must be 1 to 40 characters of a-z, 0-9 and -")
            for name in ("..", "a/b", "a\nb", "\x1b[31m", "a" * 41, "名" * 9, "")
        ),
        (["--credentials", "nowhere"], "nowhere/key.pem: cannot be read"),
    ],
)
def test_bad_options_are_one_line_and_status_2(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = command("device", *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err


def test_lines_of_the_plain_log_begin_with_the_local_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = dict[str, Any]()
    monkeypatch.setattr(logging, "basicConfig", lambda **options: given.update(options))
    for library in ("GRPC", "TRANSFORMERS"):
        monkeypatch.setenv(f"{library}_VERBOSITY", "kept")
    device._log_as("plain")
    record = logging.makeLogRecord({"msg": "unit 0 is gone", "created": 1.8e9})
    (handler,) = given["handlers"]
    assert handler.format(record) == f"{datetime.fromtimestamp(1.8e9)} unit 0 is gone"


def test_the_credentials_of_a_control_unit_are_refused(command: Command, tmp_path: Path) -> None:
    own = temporary_authority(tmp_path / "all", ["pi"])[CONTROL_UNIT]
    status, _, err = command("device", "--credentials", own)
    assert (status, err.count("\n")) == (2, 1)
    assert "is of control-unit" in err


def test_a_name_that_differs_from_the_certificate_is_refused(
    command: Command, tmp_path: Path
) -> None:
    own = temporary_authority(tmp_path / "all", ["pi"])["pi"]
    status, _, err = command("device", "--credentials", own, "--name", "jetson")
    assert (status, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--listen", "7705"], "--listen: address '7705': must be HOST:PORT"),
        (["--memory", "3000000GB"], "--memory 3000000GB: this process may use "),
    ],
)
def test_invalid_values_of_options_are_errors(
    command: Command, options: list[str], fault: str
) -> None:
    status, _, err = command("device", "--insecure", *options)
    assert (status, err.count("\n")) == (2, 1) and err.startswith(f"error: {fault}")


@pytest.mark.thorough
def test_a_restarted_device_keeps_its_name_and_address() -> None:
    """It is killed and started again. While a device runs, another device cannot use its port."""
    with device_process("--name", "pi", "--listen", "127.0.0.1:0") as first:
        address = first.address
        with pytest.raises(AssertionError, match=f"--listen {address}: cannot listen there"):
            device_process("--listen", address).__enter__()
        first.process.kill()
        assert first.ended()[0] == -signal.SIGKILL
    with device_process("--name", "pi", "--listen", address) as again:
        assert (again.name, again.address) == ("pi", address)
        again.process.send_signal(signal.SIGINT)
        assert again.ended() == (0, [], "")


@pytest.mark.thorough
def test_a_signal_during_the_start_ends_the_device() -> None:
    """The signal arrives while torch is imported, which would swallow an exception."""
    program = "import builtins\nreal = builtins.__import__\n" + (
        "def told(name, *rest, **named):\n"
        "    if name == 'torch': print('imports', flush=True)\n"
        "    return real(name, *rest, **named)\n"
        f"builtins.__import__ = told\n{COMMAND}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "device", "--insecure"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "imports\n"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_leaving_device_finishes_its_action_and_notifies_the_control_unit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The round continues without the device, and its result has the same bits."""
    caplog.set_level("INFO")
    plan = plan_of([device_name(0), device_name(1)], (2, 2))
    with device_process("--log-format", "json", program=SLOW) as slow, daemons(1) as others:
        round_ = _InThread(lambda: Work().remote(plan, [slow, *others], lost=[device_name(0)]))
        assert slow.line() == "begun"
        slow.ask_to_end()
        status, lines, err = slow.ended()
        assert (status, lines) == (0, ["done"])
        assert round_.result().equals(Work().inline(plan))
    assert "this device is leaving" in caplog.text
    logged = [json.loads(line) for line in err.splitlines()]
    assert [set(each) for each in logged] == [{"time", "level", "message"}] * len(logged)
    assert {each["level"] for each in logged} == {"INFO", "WARNING"}


@pytest.mark.thorough
def test_a_second_signal_ends_the_device_at_once() -> None:
    plan = plan_of([device_name(0), device_name(1)], (2, 2))
    with device_process(program=SLOW) as slow, daemons(1) as others:
        round_ = _InThread(lambda: Work().remote(plan, [slow, *others], lost=[device_name(0)]))
        assert slow.line() == "begun"
        slow.ask_to_end()
        time.sleep(0.5)  # the kernel merges two signals that are sent at once
        slow.ask_to_end()
        assert slow.ended()[:2] == (3, [])
        assert round_.result().equals(Work().inline(plan))


class _InThread:
    """Work in another thread."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._found: list[Result] = []
        self._thread = threading.Thread(target=lambda: self._found.append(work()), daemon=True)
        self._thread.start()

    def result(self) -> Result:
        self._thread.join(60)
        (found,) = self._found
        return found
