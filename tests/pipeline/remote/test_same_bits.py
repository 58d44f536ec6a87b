"""A round on daemons is the round in one thread, bit for bit."""

import pytest
from device_cluster import Work, daemons, device_name, plan_of

from device_app.daemon import Daemon
from pipeline.schedule import SCHEDULES

NAMES = [device_name(k) for k in range(4)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("cut", [(4,), (1, 3), (2, 1, 1), (1, 1, 1, 1)], ids=str)
def test_devices_equal_inline(cut: tuple[int, ...], recompute: bool, schedule: str) -> None:
    """Losses, norms, weights and optimiser state after two steps, with dropout."""
    work, plan = Work(recompute=recompute), plan_of(NAMES, cut, 3, schedule)
    with daemons(len(cut)) as there:
        assert work.remote(plan, there).equals(Work().inline(plan))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hops_through_the_control_unit_change_nothing(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device dials another."""
    work, plan = Work(relay=True), plan_of(NAMES, (2, 1, 1), 3, schedule)
    monkeypatch.setattr(Daemon, "_dial", None)
    with daemons(3) as there:
        assert work.remote(plan, there).equals(work.inline(plan))
