"""The privacy budget (ε) that an owner sets for all runs together."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from sections import privacy_settings

from collapipe.errors import BudgetSpentError, ConfigError
from collapipe.owner_account import OwnerAccount
from collapipe.privacy.accounting import epsilon
from collapipe.sections import PrivacySettings

DELTA = 1e-5
QUIET = privacy_settings(clip_norm=1.0, noise_multiplier=4.0)
LOUD = replace(QUIET, noise_multiplier=2.0)
BY_UNITS = replace(QUIET, secure_aggregation=True, noise_by="units")
THREE = epsilon(QUIET, 3) * 1.0001  # slightly more than the ε of three rounds


def account(tmp_path: Path, limit: float = THREE) -> OwnerAccount:
    return OwnerAccount("berlin", tmp_path / "unit.privacy.json", limit, DELTA)


def test_successive_runs_share_the_owners_budget(tmp_path: Path) -> None:
    for _ in range(2):
        account(tmp_path).charge(QUIET)
    account(tmp_path).check(QUIET)
    account(tmp_path).charge(QUIET)  # by a new object, as in another process
    for further in account(tmp_path).check, account(tmp_path).charge:
        with pytest.raises(BudgetSpentError) as refused:
            further(QUIET)
    words = str(refused.value)
    for number in f"{THREE:g}", f"{epsilon(QUIET, 3):.3g}", f"{epsilon(QUIET, 4):.3g}", "berlin":
        assert number in words
    assert account(tmp_path).spent().rounds == 3
    assert f"{epsilon(QUIET, 3):.3g}" in account(tmp_path).summary()
    account(tmp_path, limit=9).charge(QUIET)  # the owner has raised the limit


@pytest.mark.parametrize("third", [LOUD, BY_UNITS])
def test_rounds_with_different_noise_are_composed(tmp_path: Path, third: PrivacySettings) -> None:
    own = account(tmp_path, limit=50)
    for privacy in QUIET, QUIET, third:
        own.charge(privacy)
    events = [GaussianDpEvent(each.noise_multiplier) for each in (QUIET, QUIET, third)]
    by = RdpAccountant() if third is BY_UNITS else PLDAccountant()
    expected = by.compose(ComposedDpEvent(events)).get_epsilon(DELTA)
    assert own.spent().epsilon(DELTA) == pytest.approx(expected, rel=1e-3)
    assert dp_accounting.get_epsilon_gaussian(4.0, DELTA) < expected


def test_concurrent_runs_cannot_exceed_the_limit(tmp_path: Path) -> None:
    def charged(_: int) -> bool:
        try:
            account(tmp_path).charge(QUIET)
        except BudgetSpentError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(charged, range(12))) == 3
    assert account(tmp_path).spent().rounds == 3


@pytest.mark.parametrize("text", ["{}", "", '{"rounds": 1, "by_server": -1, "by_units": 0}', "[]"])
def test_an_invalid_account_file_is_an_error(tmp_path: Path, text: str) -> None:
    own = account(tmp_path)
    own.file.write_text(text)
    for further in own.check, own.charge:
        with pytest.raises(ConfigError, match="not the account of a unit"):
            further(QUIET)
