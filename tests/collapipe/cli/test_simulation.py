"""The parts of a simulation that need no Flower run: quoting, environment, the end of processes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from flwr.common.config import parse_config_args
from hypothesis import example, given
from hypothesis import strategies as st

from collapipe.cli import simulation
from collapipe.config import received
from collapipe.config.resolved import Resolved
from collapipe.errors import CollaPipeError, ConfigError
from collapipe.flower import commands

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | TEXT,
        lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
        max_leaves=9,
    )
)
@example('\x00\x1b\x7f\x85\u2028 "\'""" \'\'\' \\" \\u0022 ${a} # ü😀\r\n')
@example(os.fsdecode(b"/\xff"))
def test_any_options_come_through_flower(value: object) -> None:
    """From the command to the server's app, and the same from there to a unit's."""
    options = Resolved(tree={"a": value}, run_dir="b", overrides=("c=1",), choices={"d": "e"})
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(commands.run_config(options.text, None))
        file.flush()
        run_config = parse_config_args([file.name])
    assert run_config == {"settings": options.text, "resume": ""}
    found = received(run_config)
    assert repr(vars(found)) == repr(vars(options)) and found.text == options.text


def test_every_process_of_a_site_ends_with_it() -> None:
    """A child in a session of its own, which ignores SIGTERM, and its orphaned child."""
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    with simulation._site() as site:
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            env=site.environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            family = simulation.ProcessFamily(site.home, child.pid)
            assert len(family.named("")) == 2
            simulation.end_all(site.home, child.pid)
        assert child.returncode == -signal.SIGKILL
        assert family.named("") == set()
    assert not site.home.exists()


def test_a_site_ends_its_own_processes_only() -> None:
    with (
        simulation._site() as mine,
        simulation._site() as other,
        subprocess.Popen(["sleep", "60"], env=other.environment) as process,
    ):
        simulation.end_all(mine.home)
        assert process.poll() is None
        simulation.end_all(other.home)
        assert process.wait() == -signal.SIGKILL


def test_a_look_that_takes_longer_than_the_grace_is_no_excuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine that is busy."""
    real = simulation.ProcessFamily.named

    def slow(family: simulation.ProcessFamily, name: str) -> set[psutil.Process]:
        found = real(family, name)
        time.sleep(0.2)
        return found

    monkeypatch.setattr(simulation.ProcessFamily, "named", slow)
    monkeypatch.setattr(simulation, "_GRACE_SECONDS", 0.1)
    with (
        simulation._site() as mine,
        subprocess.Popen(["sleep", "60"], env=mine.environment) as process,
    ):
        simulation.ProcessFamily(mine.home, None).signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_the_environment_is_private_quiet_and_finds_flowers_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLWR_HOME", "/somewhere/else")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")
    with simulation._site() as site:
        assert site.environment["FLWR_HOME"] == str(site.home)
        assert site.environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
        assert site.environment["NO_PROXY"] == "example.org,localhost,127.0.0.1,::1"
        assert site.environment["FLWR_TELEMETRY_ENABLED"] == "0"
        assert list((site.home / "empty").iterdir()) == []
    assert os.environ["FLWR_HOME"] == "/somewhere/else"


@pytest.mark.parametrize("folder", ["/tmp/" + 35 * "x", "/tmp/Jürgen"])
def test_a_folder_in_which_ray_would_hang_is_refused(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", folder)
    with (
        pytest.raises(ConfigError, match=f"TMPDIR={folder}: .*RAY_TMPDIR=/tmp"),
        simulation._site(),
    ):
        pass
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    with simulation._site() as site:
        assert site.environment["RAY_ADDRESS"] == "local"


def test_a_missing_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.shutil, "which", lambda *_, **__: None)
    with (
        simulation._site() as site,
        pytest.raises(CollaPipeError, match="was not found; pip install"),
        simulation._super_link(site),
    ):
        pass


def test_a_refusing_super_link_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "free_port", lambda: 0)
    with (
        simulation._site() as site,
        pytest.raises(CollaPipeError, match=r"ended with status 2 .*65535"),
        simulation._super_link(site),
    ):
        pass
