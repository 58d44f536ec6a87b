"""Parts of a simulation that need no Flower run: quoting, environment, and ending processes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

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
def test_flowers_run_configuration_does_not_change_options(value: object) -> None:
    """Apps get exactly the options that the command has written."""
    options = Resolved(tree={"a": value}, run_dir="b", overrides=("c=1",), choices={"d": "e"})
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(commands.run_config(options.text, None))
        file.flush()
        run_config = parse_config_args([file.name])
    assert run_config == {"settings": options.text, "resume": ""}
    found = received(run_config)
    assert repr(vars(found)) == repr(vars(options)) and found.text == options.text


def test_all_processes_of_a_simulation_end_with_it() -> None:
    """A child in another session ignores SIGTERM and has a child, which becomes an orphan."""
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


def test_a_simulation_ends_only_its_own_processes() -> None:
    with (
        simulation._site() as mine,
        simulation._site() as other,
        subprocess.Popen(["sleep", "60"], env=other.environment) as process,
    ):
        simulation.end_all(mine.home)
        assert process.poll() is None
        simulation.end_all(other.home)
        assert process.wait() == -signal.SIGKILL


def test_processes_are_killed_even_if_listing_them_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine, listing can take longer than the grace period."""
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


def test_a_full_folder_in_which_ray_would_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation.shutil, "disk_usage", lambda folder: Mock(free=2**20))
    with pytest.raises(ConfigError, match=r"1,048,576 bytes are free"), simulation._site():
        pass


def test_a_missing_flower_command_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.shutil, "which", lambda *_, **__: None)
    with (
        simulation._site() as site,
        pytest.raises(CollaPipeError, match="was not found; pip install"),
        simulation._super_link(site),
    ):
        pass


def test_the_error_quotes_a_super_link_that_fails_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "free_port", lambda: 0)
    with (
        simulation._site() as site,
        pytest.raises(CollaPipeError, match=r"ended with status 2 .*65535"),
        simulation._super_link(site),
    ):
        pass
