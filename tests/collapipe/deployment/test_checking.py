"""A unit's check with its server before it takes part."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from served import serving

from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.bundle import read_certificate
from collapipe.credentials.keys import PEM, key_pem, make_key, read_key
from collapipe.credentials.member import Role
from collapipe.credentials.signing import SERVER, Authority
from collapipe.deployment import checking
from collapipe.deployment.control import ask
from collapipe.deployment.server_folder import NODES, create
from collapipe.deployment.serving import keys
from collapipe.errors import ConfigError, LinkError
from collapipe.flower.commands import free_port

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("none", []),
        ("clock 200", []),  # Flower accepts 300 s
        ("clock 299", []),
        ("clock -302", [("clock", True, False)]),
        ("version", [("version", False, False)]),
        ("key starting", [("key", False, False)]),
        ("key unknown", [("key", True, True)]),
        ("authority", [("server", True, False)]),
    ],
)
def test_a_check_reports_each_fault_and_whether_it_blocks_the_unit(
    fault: str,
    expected: list[tuple[str, bool, bool]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = free_port(), free_port()
    folder, another = (create(tmp_path / n, ["berlin", "paris"], "127.0.0.1", *ports) for n in "ab")
    own = folder.root / "units" / "berlin"
    AuthorityFolder(folder.authority).add("berlin", Role.UNIT, 300, own / "credentials")
    (own / "train.csv").touch()
    what, _, how = fault.partition(" ")
    if how != "starting":
        known: dict[str, str] = {} if how == "unknown" else {keys(folder)["berlin"]: "17"}
        (folder.flower_home / NODES).write_text(json.dumps(known))
    if what == "clock":
        server_time = datetime.now(UTC) - timedelta(seconds=int(how))
        monkeypatch.setattr(checking, "parsedate_to_datetime", lambda _: server_time)
    elif what == "version":
        monkeypatch.setattr(checking, "__version__", "0")
    with serving(another if what == "authority" else folder):
        wrong = [each for each in checking.findings(own / "unit.yaml") if each.error]
    assert [(each.what, each.bars, each.refused) for each in wrong] == expected
    assert all(each.way_out for each in wrong)


def test_the_way_out_of_a_wrong_server_includes_the_file(tmp_path: Path) -> None:
    folder = create(tmp_path / "a", ["berlin"], "127.0.0.1", free_port(), free_port())
    own = folder.root / "units" / "berlin"
    AuthorityFolder(folder.authority).add("berlin", Role.UNIT, 300, own / "credentials")
    found = {each.what: each for each in checking.findings(own / "unit.yaml")}
    assert "does not answer" in str(found["server"].error)
    assert "correct server in the file" in found["server"].way_out


def test_the_way_out_of_an_expired_server_certificate_includes_clocks(tmp_path: Path) -> None:
    """On the server, serving again does not help."""
    folder = create(tmp_path / "a", ["berlin"], "127.0.0.1", free_port(), free_port())
    own = folder.root / "units" / "berlin"
    AuthorityFolder(folder.authority).add("berlin", Role.UNIT, 300, own / "credentials")
    key, before = make_key(), datetime.now(UTC) - timedelta(hours=1)
    signer = Authority(
        read_key((folder.authority / "authority.key").read_bytes(), folder.authority),
        read_certificate(folder.trusted, ""),
    )
    expired = signer.issue_for(["127.0.0.1"], key.public_key(), [SERVER], before, before)
    folder.key.write_bytes(key_pem(key))
    folder.certificate.write_bytes(expired.public_bytes(PEM))
    with serving(folder):
        found = {each.what: each for each in checking.findings(own / "unit.yaml")}
        assert "clock" in found["server"].way_out
        with pytest.raises(LinkError, match=r"deploy renew .*/a and serve again, or"):
            ask(folder, "list-runs", {})


def test_a_renewed_certificate_names_the_host_that_units_dial(
    command: Command, tmp_path: Path
) -> None:
    """Units that have the authority's certificate accept it."""
    folder = create(tmp_path / "a", ["berlin"], "127.0.0.1", free_port(), free_port())
    own = folder.root / "units" / "berlin"
    AuthorityFolder(folder.authority).add("berlin", Role.UNIT, 300, own / "credentials")
    file = folder.root / "server.yaml"
    file.write_text(file.read_text().replace("127.0.0.1", "127.0.0.2"))

    def on_server() -> checking.Finding:
        return next(each for each in checking.findings(folder.root) if each.what == "host")

    assert on_server().error == "127.0.0.2: the certificate names 127.0.0.1, localhost, 127.0.0.1"
    assert f"collapipe deploy renew {folder.root}" in on_server().way_out
    folder.key.write_text("damaged")
    status, out, err = command("deploy", "renew", folder.root)
    assert (status, err) == (0, "") and "for 127.0.0.2" in out
    assert on_server().error is None
    with serving(folder):
        found = {each.what: each.error for each in checking.findings(own / "unit.yaml")}
    assert found["server"] is None


def test_an_authority_that_ends_soon_certifies_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = create(tmp_path / "a", ["berlin"], "127.0.0.1", free_port(), free_port())
    before = folder.identity()
    monkeypatch.setattr("collapipe.credentials.authority.expires_soon", lambda _: True)
    with pytest.raises(ConfigError, match=r"the authority ends on .*; make a new federation: "):
        folder.renew()
    assert folder.identity() == before
