"""Loading a folder of credentials; errors name the file and what to do."""

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from made_cluster import Cluster

from collapipe.credentials.authority import temporary_authority
from collapipe.credentials.credentials import load
from collapipe.credentials.member import Role, check_name, dns_name, parse_dns_name
from collapipe.errors import CollaPipeError, ConfigError, WireError

AGO = timedelta(hours=-1)


def test_a_created_folder_is_loaded_unchanged(cluster: Cluster) -> None:
    made = cluster.member("pi-4")
    found = load(made.folder)
    assert (made.member.name, made.member.role) == ("pi-4", Role.DEVICE)
    assert found.member == made.member
    assert (found.key, found.certificate, found.authority) == (
        made.key,
        made.certificate,
        made.authority,
    )
    assert found.expires == made.expires
    assert found.check(found.certificate) == found.member


def test_printed_credentials_contain_no_key(cluster: Cluster) -> None:
    made = cluster.member()
    secret = made.key.decode().splitlines()[1]
    assert secret not in repr(load(made.folder)) + str(load(made.folder)) + repr(cluster.authority)
    assert "PRIVATE" not in repr(made)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_key_that_others_may_read_is_refused(mode: int, cluster: Cluster) -> None:
    key = cluster.member().folder / "key.pem"
    key.chmod(mode)
    spaced = key.parent.rename(key.parent.with_name("a pi")) / key.name
    with pytest.raises(ConfigError, match=f"{spaced}: has mode {mode:o}.*; chmod 600 '{spaced}'$"):
        load(spaced.parent)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("key.pem", "credentials request"),
        ("certificate.pem", "credentials install"),
        ("authority.pem", "credentials install"),
        ("revoked.crl", "credentials install"),
    ],
)
def test_a_missing_or_broken_file_is_named(name: str, way_out: str, cluster: Cluster) -> None:
    folder = cluster.member().folder
    (folder / name).write_bytes(b"-----BEGIN NOTHING-----\n")
    with pytest.raises(ConfigError, match=str(folder)):
        load(folder)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"{folder / name}: cannot be read.*{way_out}"):
        load(folder)


def test_files_of_another_member_are_refused(cluster: Cluster, others: Cluster) -> None:
    mine, second, stranger = cluster.member(), cluster.member(), others.member()
    for name, of in (
        ("certificate.pem", second),
        ("certificate.pem", stranger),
        ("authority.pem", stranger),
        ("revoked.crl", stranger),
        ("key.pem", stranger),
    ):
        folder = shutil.copytree(mine.folder, mine.folder.with_name("copy"))
        shutil.copy(of.folder / name, folder / name)
        with pytest.raises(ConfigError, match=str(folder)):
            load(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("starts_in", "expires_in"),
    [(timedelta(0), AGO), (timedelta(days=5), timedelta(days=9))],
    ids=["expired", "early"],
)
def test_an_expired_or_future_certificate_is_reported_with_its_time(
    starts_in: timedelta, expires_in: timedelta, cluster: Cluster
) -> None:
    made = cluster.member(starts_in=starts_in, expires_in=expires_in)
    with pytest.raises(
        ConfigError, match=f"{made.expires:%F %T}.*clock.*request .* --name {made.member.name}"
    ):
        load(made.folder)


def test_clocks_may_differ_by_a_day(cluster: Cluster) -> None:
    made = cluster.member(starts_in=timedelta(hours=23), expires_in=timedelta(days=9))
    assert load(made.folder).member == made.member


def test_credentials_of_a_revoked_member_are_refused(cluster: Cluster) -> None:
    made = cluster.member()
    cluster.revoke(made.member)
    with pytest.raises(ConfigError, match="revoked; make a new key in a new folder"):
        load(made.folder)


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a.b", "a" * 41, "ä", "a\n"])
def test_invalid_names_are_refused(name: str) -> None:
    for parse in (check_name, lambda name: parse_dns_name(dns_name(name, Role.DEVICE))):
        with pytest.raises(CollaPipeError, match=r"name|NAME"):
            parse(name)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", ["a", "0", "pi-4", "a--b", "a" * 40])
def test_a_name_is_the_same_after_writing_and_reading(
    name: str, role: Role, cluster: Cluster
) -> None:
    assert parse_dns_name(dns_name(check_name(name), role)) == (name, role)
    member = load(cluster.member(name, role).folder).member
    assert (member.name, member.role) == (name, role)


def test_temporary_credentials_trust_only_each_other(tmp_path: Path, cluster: Cluster) -> None:
    folders = temporary_authority(tmp_path / "up", ["a", "b"])
    assert list(folders) == ["control-unit", "a", "b"]
    unit, a, b = map(load, folders.values())
    assert unit.member.role == Role.CONTROL_UNIT
    assert {a.member.role, b.member.role} == {Role.DEVICE}
    assert a.check(b.certificate) == b.member
    with pytest.raises(WireError):
        a.check(cluster.member().certificate)
    assert list((tmp_path / "up").rglob("authority.key")) == []
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        temporary_authority(tmp_path / "up", ["a"])
