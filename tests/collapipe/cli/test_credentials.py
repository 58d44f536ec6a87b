"""``collapipe credentials``: creating, renewing and revoking certificates, and errors."""

import io
import os
import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from stat import S_IMODE
from unittest.mock import Mock

import pytest

from collapipe.credentials import authority
from collapipe.credentials.credentials import load
from collapipe.credentials.member import Role

Command = Callable[..., tuple[int, str, str]]
Credentials = Callable[..., str]
FINGERPRINT = r"((?:[0-9a-f]{4} ){7}[0-9a-f]{4})"


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, empty; with umask 0, files have exactly the modes that are set."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    yield tmp_path
    os.umask(before)


@pytest.fixture
def done(command: Command) -> Credentials:
    """A function that runs a command, which must succeed, and returns its output."""

    def run(*arguments: object) -> str:
        status, out, err = command("credentials", *arguments)
        assert (status, err) == (0, "")
        return out

    return run


@pytest.fixture
def refused(command: Command) -> Credentials:
    """A function that runs a command, which must fail without changes, and returns its error."""

    def run(*arguments: object) -> str:
        before = contents()
        status, _, err = command("credentials", *arguments)
        assert (status, err.count("\n")) == (2, 1)
        assert err.startswith("error: ")
        assert contents() == before
        return err

    return run


def contents() -> dict[str, tuple[int, bytes]]:
    """Modes and bytes of all files in the current folder."""
    found = sorted(path for path in Path().rglob("*"))
    return {
        str(path): (S_IMODE(path.stat().st_mode), path.read_bytes() if path.is_file() else b"")
        for path in found
    }


def fingerprint(out: str, label: str = "fingerprint") -> str:
    """The fingerprint that follows ``label`` in the output."""
    (found,) = re.findall(rf"^{label} +{FINGERPRINT}\b", out, re.MULTILINE)
    return str(found)


def signed(out: str) -> Path:
    """The file that ``sign`` names."""
    (found,) = re.findall(r"^signed +(.+)$", out, re.MULTILINE)
    return Path(found)


def enrol(done: Credentials, name: str = "jetson") -> None:
    """Give a device a key and a certificate, in a folder with its name."""
    done("request", name, "--name", name)
    done("install", name, signed(done("sign", "farm", f"{name}/request.pem", "--yes")))


def test_a_device_gets_a_certificate_without_sending_its_key(done: Credentials) -> None:
    made = done("init", "farm")
    request = done("request", "box/jetson", "--name", "jetson")
    key = Path("box/jetson/key.pem").read_bytes()
    Path("travels").mkdir()
    shutil.copy("box/jetson/request.pem", "travels")
    out = done("sign", "farm", "travels/request.pem", "--fingerprint", fingerprint(request))
    assert fingerprint(out) == fingerprint(request)
    assert fingerprint(out, "authority") == fingerprint(made, "authority")
    shutil.copy(signed(out), "travels")
    installed = done("install", "box/jetson", Path("travels") / signed(out).name)
    assert fingerprint(installed, "authority") == fingerprint(made, "authority")
    jetson, unit = load(Path("box/jetson")), load(Path("farm/control-unit"))
    assert (jetson.member.name, jetson.member.role) == ("jetson", Role.DEVICE)
    assert unit.member.role == Role.CONTROL_UNIT
    assert unit.check(jetson.certificate) == jetson.member
    assert jetson.key == key
    for file in [*Path("travels").iterdir(), *Path("farm").rglob("*")]:
        assert file.is_dir() or key not in file.read_bytes()
    assert not any(b"PRIVATE" in file.read_bytes() for file in Path("travels").iterdir())


def test_only_the_owner_can_read_keys(done: Credentials) -> None:
    done("init", "farm")
    enrol(done)
    done("add", "farm", "pi", "--output", "pi")
    keys = {"farm/authority.key", *(f"{x}/key.pem" for x in ("farm/control-unit", "jetson", "pi"))}
    for path, (mode, content) in contents().items():
        wanted = 0o700 if Path(path).is_dir() else 0o600 if path in keys else 0o644
        assert (path, mode) == (path, wanted)
        assert (b"PRIVATE" in content) is (path in keys)
        assert "partial" not in path


def test_sign_takes_a_role_and_a_number_of_days(done: Credentials, refused: Credentials) -> None:
    done("init", "farm")
    done("request", "desk", "--name", "desk")
    for days in ("0", "-1", "3651"):
        sign = ("sign", "farm", "desk/request.pem", "--yes", "--days", days)
        assert f"--days {days}: must be 1 to 36" in refused(*sign)
    out = done("sign", "farm", "desk/request.pem", "--yes", "--role", "control-unit", "--days", "3")
    done("install", "desk", signed(out))
    desk = load(Path("desk"))
    assert (desk.member.role, f"{desk.expires:%F %R} UTC" in out) == (Role.CONTROL_UNIT, True)


@pytest.mark.parametrize(("control_unit", "role"), [(True, Role.DEVICE), (False, Role.UNIT)])
def test_members_are_devices_in_a_cluster_and_units_in_a_federation(
    control_unit: bool, role: Role, done: Credentials
) -> None:
    authority.create(Path("farm"), control_unit)
    done("request", "desk", "--name", "desk")
    done("install", "desk", signed(done("sign", "farm", "desk/request.pem", "--yes")))
    done("add", "farm", "pi", "--output", "pi")
    assert [load(Path(each)).member.role for each in ("desk", "pi")] == [role, role]


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 2), ("", 2)])
def test_sign_asks_a_person_to_compare_fingerprints(
    answer: str,
    status: int,
    done: Credentials,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done("init", "farm")
    request = done("request", "jetson", "--name", "jetson")
    terminal = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    ended, out, _ = command("credentials", "sign", "farm", "jetson/request.pem")
    assert ended == status
    assert fingerprint(out) == fingerprint(request)
    assert Path("farm/issued/jetson.1.crt").exists() is (status == 0)


def test_a_request_is_not_signed_without_its_fingerprint(
    done: Credentials, refused: Credentials
) -> None:
    done("init", "farm")
    request, other = (done("request", name, "--name", name) for name in ("jetson", "pi"))
    sign = ("sign", "farm", "jetson/request.pem")
    assert "--fingerprint VALUE" in refused(*sign)
    for wrong in (fingerprint(other), "", fingerprint(request)[:9]):
        assert fingerprint(request) in refused(*sign, "--fingerprint", wrong)
        refused(*sign, "--yes", "--fingerprint", wrong)
    done(*sign, "--fingerprint", fingerprint(request).replace(" ", "").upper())


def test_renewal_keeps_the_key(done: Credentials, refused: Credentials) -> None:
    done("init", "farm")
    enrol(done)
    before = load(Path("jetson"))
    enrol(done)
    after = load(Path("jetson"))
    assert after.key == before.key
    assert after.member.serial != before.member.serial
    assert after.check(before.certificate) == before.member  # both stay valid until they expire
    done("request", "farm/control-unit", "--name", "control-unit")
    assert "revoke" in refused("sign", "farm", "farm/control-unit/request.pem", "--yes")
    role = ("--role", "control-unit")
    out = done("sign", "farm", "farm/control-unit/request.pem", "--yes", *role)
    done("install", "farm/control-unit", signed(out))


def test_revocation_by_name_and_by_serial(done: Credentials, refused: Credentials) -> None:
    done("init", "farm")
    for name in ("jetson", "pi"):
        enrol(done, name)
    first = load(Path("jetson"))
    enrol(done)
    second, pi, unit = (load(Path(name)) for name in ("jetson", "pi", "farm/control-unit"))
    done("revoke", "farm", f"{first.member.serial:x}")
    assert first.member.serial in unit.revocations
    assert second.member.serial not in unit.revocations
    done("revoke", "farm", "jetson")
    assert second.member.serial in unit.revocations
    assert second.member.serial not in pi.revocations  # until the list is installed there
    done("install", "pi", "farm/revoked.crl")
    assert second.member.serial in pi.revocations
    for which in ("jetson", "nobody", "ff", f"{first.member.serial:x}"):
        assert "names: control-unit, pi" in refused("revoke", "farm", which)
    states = re.findall(r"^(\S+) +(\S+) +(\S+) +\S+ +(\S+)$", done("list", "farm"), re.MULTILINE)
    assert set(states[1:]) == {
        ("control-unit", "control-unit", "valid", f"{unit.member.serial:x}"),
        ("jetson", "device", "revoked", f"{first.member.serial:x}"),
        ("jetson", "device", "revoked", f"{second.member.serial:x}"),
        ("pi", "device", "valid", f"{pi.member.serial:x}"),
    }


def test_a_certificate_that_is_not_yet_valid_is_listed_and_can_be_revoked(
    done: Credentials, refused: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the clock of the authority's machine was put back."""
    done("init", "farm")
    with monkeypatch.context() as later:
        now = datetime.now(UTC) + timedelta(days=2)
        later.setattr(authority, "datetime", Mock(now=lambda _: now))
        enrol(done)
    assert re.search(r"^jetson +device +not yet valid ", done("list", "farm"), re.MULTILINE)
    assert "revoke it first" in refused("add", "farm", "jetson", "--output", "trial")
    done("revoke", "farm", "jetson")
    assert re.search(r"^jetson +device +revoked ", done("list", "farm"), re.MULTILINE)


def test_a_revoked_name_can_be_used_again_with_another_key(
    done: Credentials, refused: Credentials
) -> None:
    done("init", "farm")
    enrol(done)
    done("request", "new", "--name", "jetson")
    assert "jetson" in refused("sign", "farm", "new/request.pem", "--yes")
    done("revoke", "farm", "jetson")
    for name in ("jetson", "pi"):
        done("request", "jetson", "--name", name)
        assert "was revoked" in refused("sign", "farm", "jetson/request.pem", "--yes")
    done("install", "new", signed(done("sign", "farm", "new/request.pem", "--yes")))
    assert load(Path("new")).member.name == "jetson"


def test_a_name_or_a_key_of_another_member_is_refused(
    done: Credentials, refused: Credentials
) -> None:
    done("init", "farm")
    enrol(done)
    done("request", "other", "--name", "control-unit")
    assert "revoke it first" in refused("sign", "farm", "other/request.pem", "--yes")
    assert "revoke it first" in refused("add", "farm", "jetson", "--output", "trial")
    done("request", "jetson", "--name", "renamed")
    error = refused("sign", "farm", "jetson/request.pem", "--yes")
    assert "key; revoke it first, then make a new key" in error  # a revoked one is never signed
    done("request", "farm/control-unit", "--name", "control-unit")
    error = refused("sign", "farm", "farm/control-unit/request.pem", "--yes")
    assert "renew it with --role control-unit, or revoke it first" in error


def test_no_file_is_overwritten(done: Credentials, refused: Credentials, desk: Path) -> None:
    done("init", "farm")
    (desk / "taken").mkdir()
    (desk / "taken/thesis.txt").write_text("mine")
    (desk / "file").touch()
    (desk / "half").mkdir()
    (desk / "half/request.pem").write_text("mine")
    for folder in ("farm", "taken", "file"):
        assert folder in refused("init", folder)
        assert folder in refused("add", "farm", "pi", "--output", folder)
    assert "half" in refused("request", "half", "--name", "pi")
    assert "file" in refused("request", "file", "--name", "pi")
    done("request", "taken", "--name", "pi")  # other files in the folder are allowed
    assert (desk / "taken/thesis.txt").read_text() == "mine"
    (desk / "empty").mkdir()
    done("init", "empty")


def test_install_refuses_files_that_do_not_match(done: Credentials, refused: Credentials) -> None:
    for farm in ("farm", "ranch"):
        done("init", farm)
    for name in ("jetson", "pi"):
        enrol(done, name)
    done("request", "jetson", "--name", "jetson")
    ranch = signed(done("sign", "ranch", "jetson/request.pem", "--yes"))
    assert "another authority" in refused("install", "jetson", ranch)
    assert "another authority" in refused("install", "jetson", "ranch/revoked.crl")
    assert "device pi" in refused("install", "jetson", "farm/issued/pi.1.crt")
    assert "another key" in refused("install", "jetson", "farm/issued/pi.1.crt")
    for file in ("jetson/certificate.pem", "jetson/request.pem", "jetson/key.pem", "nowhere"):
        assert file in refused("install", "jetson", file)
    assert "credentials request" in refused("install", "new", "farm/issued/pi.1.crt")
    refused("install", "new", "farm/revoked.crl")


def test_an_older_list_does_not_undo_revocations(done: Credentials, refused: Credentials) -> None:
    done("init", "farm")
    for name in ("jetson", "pi"):
        enrol(done, name)
    shutil.copy("farm/revoked.crl", "older.crl")
    thief = load(Path("pi")).member
    done("revoke", "farm", "pi")
    done("install", "jetson", "farm/revoked.crl")
    assert "older" in refused("install", "jetson", "older.crl")
    done("install", "jetson", "farm/issued/jetson.1.crt")  # this file also has the older list
    assert thief.serial in load(Path("jetson")).revocations
    enrol(done, "nano")
    assert thief.serial in load(Path("nano")).revocations  # a new member has it at once


@pytest.mark.parametrize("name", ["", "Jetson", "jetson.local", "-x", "ä", "a" * 41, "../x"])
def test_a_bad_name_is_refused_before_anything_is_written(
    name: str, done: Credentials, refused: Credentials
) -> None:
    done("init", "farm")
    assert repr(name) in refused("request", "box", f"--name={name}")
    assert repr(name) in refused("add", "farm", "--output", "box", "--", name)


def test_invalid_requests_are_refused(done: Credentials, refused: Credentials, desk: Path) -> None:
    done("init", "farm")
    done("request", "jetson", "--name", "jetson")
    (desk / "empty.pem").touch()
    content = (desk / "jetson/request.pem").read_text().splitlines()
    flipped = "A" if content[-2][0] != "A" else "B"  # in the signature
    changed = [*content[:-2], flipped + content[-2][1:], content[-1]]
    (desk / "changed.pem").write_text("\n".join(changed) + "\n")
    _with_version(desk / "jetson/request.pem", b"\0", desk / "version.pem")
    for file in (
        *("empty.pem", "changed.pem", "nowhere.pem", "version.pem"),
        *("farm/authority.crt", "jetson/key.pem"),
    ):
        assert file in refused("sign", "farm", file, "--yes")


def _with_version(file: Path, number: bytes, damaged: Path) -> None:
    """Copy ``file`` (PEM) to ``damaged``, with an unknown version instead of ``number``."""
    first, content, rest = re.split(r"(?<=-----)\n|\n(?=-----)", file.read_text(), maxsplit=2)
    der = b64decode(content).replace(b"\2\1" + number, b"\2\1\7", 1)
    damaged.write_text("\n".join((first, b64encode(der).decode(), rest)))


def test_lists_and_certificates_of_unknown_versions_are_refused(
    done: Credentials, refused: Credentials, desk: Path
) -> None:
    done("init", "farm")
    enrol(done, "pi")
    _with_version(desk / "farm/issued/pi.1.crt", b"\2", desk / "pi.crt")
    assert "pi.crt" in refused("install", "pi", "pi.crt")
    _with_version(desk / "farm/revoked.crl", b"\1", desk / "farm/revoked.crl")
    assert "revoked.crl" in refused("list", "farm")


def test_a_folder_without_an_authority_is_refused(done: Credentials, refused: Credentials) -> None:
    done("request", "jetson", "--name", "jetson")
    for arguments in (
        ("sign", "jetson", "jetson/request.pem", "--yes"),
        ("add", "nowhere", "pi", "--output", "pi"),
        ("revoke", "jetson", "pi"),
        ("list", "nowhere"),
    ):
        assert "credentials init" in refused(*arguments)


def test_an_authority_whose_key_others_can_read_does_not_sign(
    done: Credentials, refused: Credentials
) -> None:
    done("init", "farm")
    Path("farm/authority.key").chmod(0o644)
    assert "chmod 600 farm/authority.key" in refused("add", "farm", "pi", "--output", "pi")


def test_an_authority_with_the_key_of_another_does_not_sign(
    done: Credentials, refused: Credentials
) -> None:
    done("init", "farm")
    done("init", "ranch")
    Path("ranch/authority.key").replace("farm/authority.key")
    error = refused("add", "farm", "pi", "--output", "pi")
    assert "farm/authority.key: is not of authority.crt; restore both" in error
