"""An owner sets the least number of updates in a masked sum, and the unit enforces it."""

from pathlib import Path

import pytest
from federated import TINY
from flwr.app import Context, Message, RecordDict

import client_app.app
from collapipe import owner
from collapipe.config import load_overrides
from collapipe.errors import ConfigError
from collapipe.owner_file import PrivacySection
from collapipe.secure_aggregation.messages import KeysReply, KeysRequest, Roster, SharesReply
from collapipe.secure_aggregation.unit import UnitWithKeys
from collapipe.wire import records
from collapipe.wire.messages import Failure, Setup

RUN = 1
MASKED = (
    "decoder.mode=control_unit",
    "federation.weighting=uniform",
    "federation.max_update_norm=null",
    "optimizer.state=reset",
    "privacy.clip_norm=1",
    "privacy.secure_aggregation=true",
)


def owned(folder: Path, privacy: str) -> dict[str, str]:
    """Return the configuration of a node whose owner's file has this privacy section."""
    file = folder / "unit.yaml"
    file.write_text(f"data: {{train_file: rows.csv}}\nprivacy: {privacy}\n", "utf-8")
    return {"owner": str(file)}


@pytest.mark.parametrize(("least_units", "refused"), [(2, False), (3, True)])
def test_a_unit_sends_no_shares_if_a_sum_may_have_too_few_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least_units: int, refused: bool
) -> None:
    """Two of three units must finish. The run's options are the same as without an owner."""
    settings = load_overrides([*TINY, *MASKED])
    monkeypatch.setattr(client_app.app.owner, "load_settings", lambda *configs: settings)
    own = {"partition-id": 0} | owned(tmp_path, f"{{least_units: {least_units}}}")
    unit = Context(RUN, 2, own, records.pack(Setup(settings.text, "", {})), {})  # type: ignore[arg-type]

    def ask(kind: str, message: object) -> RecordDict:
        return client_app.app.app(Message(records.pack(message), 2, kind), unit).content

    keys = records.unpack(KeysReply, ask(records.MASK_KEYS, KeysRequest(1))).keys
    others = {n: UnitWithKeys.new(n, RUN, 1).public for n in (1, 2)}
    reply = ask(records.MASK_SHARES, Roster(RUN, 1, {0: keys, **others}))
    if refused:
        assert "privacy.least_units=3" in records.unpack(Failure, reply).message
    else:
        assert records.unpack(SharesReply, reply).sealed.keys() == {1, 2}


def test_least_units_is_read_from_the_owners_file(tmp_path: Path) -> None:
    assert owner.least_units_of(owned(tmp_path, "{least_units: 3}")) == 3
    assert owner.least_units_of(owned(tmp_path, "{updates_only: true}")) == 0
    assert owner.least_units_of({}) == 0
    with pytest.raises(ConfigError, match=r"unit\.yaml:2: privacy\.least_units"):
        owner.least_units_of(owned(tmp_path, "{least_units: 1}"))


def test_least_units_requires_secure_aggregation() -> None:
    section = PrivacySection(least_units=3)
    lacking = [*section.lacking(load_overrides(TINY))]
    assert lacking == [("privacy.secure_aggregation", "must be true")]
    assert not [*section.lacking(load_overrides([*TINY, *MASKED]))]
