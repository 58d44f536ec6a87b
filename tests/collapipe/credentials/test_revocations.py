"""A revocation list is read again when its file changes; revocations are never forgotten."""

import logging

import pytest
from made_cluster import Cluster

from collapipe.credentials.bundle import REVOKED, Revocations
from collapipe.credentials.keys import PEM
from collapipe.errors import ConfigError
from collapipe.process import files


def test_a_changed_list_is_read_again(cluster: Cluster) -> None:
    mine, others = cluster.member(), [cluster.member(f"pi-{n}") for n in range(5)]
    for number, each in enumerate(others):
        assert [m.member.serial in mine.revocations for m in others] == [
            before < number for before in range(5)
        ]
        cluster.revoke(each.member)
    assert all(m.member.serial in mine.revocations for m in others)
    assert mine.member.serial not in mine.revocations


@pytest.mark.parametrize("how", ["older", "others", "broken", "gone"])
def test_a_revoked_certificate_stays_revoked(
    how: str, cluster: Cluster, others: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    mine, thief = cluster.member(), cluster.member("pi")
    file = mine.folder / REVOKED
    before = file.read_bytes()
    cluster.revoke(thief.member)
    assert thief.member.serial in mine.revocations
    others.number = 9
    bad = {"older": before, "others": others.revoked.public_bytes(PEM), "broken": b"-----BEGIN"}
    if how == "gone":
        file.unlink()
    else:
        files.replace(file, bad[how])
    with caplog.at_level(logging.WARNING):
        assert thief.member.serial in mine.revocations
        assert thief.member.serial in mine.revocations
    assert len(caplog.records) == 1  # logged once, not at every call
    assert str(file) in caplog.text
    if how != "older":  # a new object cannot know that there was a newer list
        with pytest.raises(ConfigError, match=str(file)):
            Revocations(file, cluster.authority.certificate)
