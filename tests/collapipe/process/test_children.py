"""Child processes get an environment from us and end with their parent."""

import subprocess
import sys
import urllib.request
from pathlib import Path

import httpx
import psutil
import pytest

from collapipe.cli.app import child_command
from collapipe.process.children import DIRECT, own_environment

PARENT = """
import os, subprocess, sys
from pathlib import Path
child = "import os, sys, time; from collapipe.process.children import end_with_parent; "
child += "end_with_parent(os.getppid()); print(os.getpid(), flush=True); time.sleep(60)"
subprocess.run([sys.executable, "-c", child], start_new_session=True)
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    """The child ends even if it is in another session than its parent."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(20)  # raises TimeoutExpired if the child still runs


def test_a_child_that_ignores_sigterm_is_killed_after_its_parent() -> None:
    code = PARENT.replace(
        "import os, sys, time;",
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);",
    ).replace("getppid()", "getppid(), 0.1")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(20)


@pytest.mark.parametrize(
    ("given", "url", "direct"),
    [
        ({"https_proxy": "http://127.0.0.1:9"}, "https://127.0.0.1:7000", True),
        ({"HTTPS_PROXY": "http://127.0.0.1:9"}, "https://[::1]:7000", True),
        ({"ALL_PROXY": "socks5://127.0.0.1:9"}, "http://localhost:1", True),
        ({"all_proxy": "http://127.0.0.1:9", "NO_PROXY": "a.example"}, "https://a.example", True),
        ({"all_proxy": "http://127.0.0.1:9", "no_proxy": "*"}, "https://a.example", True),
        ({"https_proxy": "http://127.0.0.1:9", **DIRECT}, "https://a.example", True),
        ({"https_proxy": "http://127.0.0.1:9"}, "https://hub.example", False),
    ],
)
def test_proxies_are_used_only_for_other_machines(
    given: dict[str, str], url: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in urllib.request.getproxies_environment():
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_proxy".upper(), raising=False)
    for name, value in own_environment(given).items():
        monkeypatch.setenv(name, value)
    with httpx.Client() as client:
        transport = client._transport_for_url(httpx.URL(url))
        assert (transport is client._transport) is direct


def test_our_commands_import_no_file_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "types.py").write_text("open('executed', 'w')\nraise SystemExit(3)\n")
    ended = subprocess.run(child_command("version"), cwd=tmp_path, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert [each.name for each in tmp_path.iterdir()] == ["types.py"]
