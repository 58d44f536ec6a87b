"""The memory that a process may use."""

from pathlib import Path

import pytest

from collapipe.process import host


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 2**40),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "3000"}, 3000),
        ("0::/a\n", {"a/memory.max": "3000", "memory.max": "2000"}, 2000),  # a container's
        ("0::/../other\n", {"memory.max": "2000"}, 2000),
        ("4:memory:/a\n3:cpu:/\n", {"memory/a/memory.limit_in_bytes": "3000"}, 3000),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": f"{2**63 - 4096}"}, 2**40),
    ],
)
def test_a_control_group_limits_the_machines_memory(
    groups: str,
    files: dict[str, str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in files.items():
        (file := tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    (tmp_path / "groups").write_text(groups)
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "fs")
    monkeypatch.setattr(host, "_OWN_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host.os, "sysconf", lambda _: 2**20)
    assert host.usable_memory_bytes() == expected
