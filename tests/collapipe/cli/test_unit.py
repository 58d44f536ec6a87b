"""``collapipe unit``: reconnecting, failing to answer, and the lock of its key."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from flwr.supercore.error.base import ApiErrorCode

from client_app import answering
from collapipe.cli import unit
from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.member import Role
from collapipe.deployment.checking import Finding
from collapipe.deployment.server_folder import create
from collapipe.errors import CollaPipeError, ConfigError, LinkError, RefusedUnitError
from collapipe.flower.commands import Flower, free_port, why_it_ended
from collapipe.models import cost


def test_a_unit_reconnects_until_the_server_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The SuperNode ends when the server restarts, and the unit starts another one. One object
    answers messages throughout, and each problem is printed once.
    """
    folder = create(tmp_path / "f", ["berlin"], "127.0.0.1", 9000, 9001)
    own = folder.root / "units" / "berlin"
    AuthorityFolder(folder.authority).add("berlin", Role.UNIT, 30, own / "credentials")
    found = iter(
        [
            [Finding("server", error="does not answer", bars=False)],
            [Finding("key", "admitted")],
            [Finding("key", error="is unknown", refused=True)],
        ]
    )
    started = list[unit._Answers]()

    @contextmanager
    def ended(*_: object) -> Iterator[Popen[bytes]]:
        with Popen(["true"]) as process:
            yield process

    monkeypatch.setattr(Flower, "process", ended)
    monkeypatch.setattr(unit, "wait_until_open", lambda *_: None)
    monkeypatch.setattr(unit._Answers, "start", lambda answers: started.append(answers))
    monkeypatch.setattr(unit._Answers, "wait", lambda _, process: process.wait())
    monkeypatch.setattr(unit, "check_unit", lambda _: next(found))
    monkeypatch.setattr(unit, "_PAUSE_S", 0.0)
    with pytest.raises(
        RefusedUnitError, match="berlin cannot take part: key: is unknown"
    ) as refused:
        unit.run_unit(own / "unit.yaml", None)
    assert refused.value.exit_status == 4  # documented: with this status, systemd does not restart
    printed = capsys.readouterr().out
    assert printed.count("dials 127.0.0.1:9000") == 2 and printed.count("does not answer") == 1
    assert len(started) == 2 and started[0] is started[1]


def test_a_unit_waits_while_its_certificate_is_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The owner may install a renewed certificate while the unit waits. Then the server gets time
    to admit it, because a unit that the server refuses ends."""
    now, pauses = datetime.now(UTC), Mock()
    soon, renewed = ((Mock(), Mock(expires=now + timedelta(hours=h))) for h in (0, 1))
    expired = ConfigError("credentials: expired; renew")
    monkeypatch.setattr(unit, "read_unit", Mock(side_effect=[soon, expired, renewed, renewed]))
    monkeypatch.setattr(unit, "time", SimpleNamespace(sleep=pauses))
    assert unit._read_again(tmp_path / "unit.yaml", "berlin") == renewed
    told = capsys.readouterr().out
    assert told.startswith("berlin: waits for valid credentials: the certificate expires at ")
    assert told.count("\n") == 1
    assert [each.args for each in pauses.mock_calls] == [(2.0,), (2.0,), (10.0,)]
    assert unit._read_again(tmp_path / "unit.yaml", "berlin") == renewed
    assert pauses.mock_calls[-1].args == (0,)


def test_a_key_that_two_machines_use_is_named() -> None:
    """Flower's last line says only that a connection could not be established."""
    code = int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)
    refused = f"[code: {code}] Failed to activate SuperNode.\nno connection\n"
    assert why_it_ended(refused).startswith("another machine takes part with this unit's key")
    assert why_it_ended("INFO: 1\nno connection\nINFO: 2\n") == "no connection"


def test_a_unit_that_can_no_longer_answer_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its SuperNode would stay online, and the server would wait for replies."""

    def broken(*_: object) -> None:
        raise ImportError("no socksio")

    monkeypatch.setattr(answering, "answer_messages", broken)
    answers = unit._Answers("127.0.0.1:1", b"secret", tmp_path)
    with Popen(["sleep", "60"]) as process:
        answers.start()
        with pytest.raises(CollaPipeError, match="cannot answer any more: no socksio"):
            answers.wait(process)
        assert process.poll() is None
        process.kill()


def test_a_key_can_be_used_by_only_one_process(tmp_path: Path) -> None:
    held = unit._locked(tmp_path / "berlin.lock", "berlin")
    with pytest.raises(LinkError, match="berlin: this key is in use"):
        unit._locked(tmp_path / "berlin.lock", "berlin")
    held.close()
    unit._locked(tmp_path / "berlin.lock", "berlin").close()


def test_a_unit_imports_slow_libraries_before_it_answers_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first reply would take 15 s on a busy machine."""
    happened = list[str]()
    monkeypatch.setattr(cost, "FakeTensorMode", lambda: happened.append("imports"))
    monkeypatch.setattr(answering, "answer_messages", lambda *_: happened.append("answers"))
    unit._Answers("127.0.0.1:1", b"secret", tmp_path)._answer()
    assert happened == ["imports", "answers"]


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\n"])
def test_an_idle_connection_to_the_metrics_ends_without_a_traceback(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unit, "_IDLE_S", 0.1)
    unit._serve_metrics(port := free_port())
    with socket.create_connection(("127.0.0.1", port), timeout=20) as idle:
        idle.sendall(sent)
        assert idle.recv(1) == b""
    assert "Traceback" not in capsys.readouterr().err
