"""What a control unit takes from its devices, and what it does not."""

from collections.abc import Iterator

import pytest
import torch
from device_cluster import Work, daemons, device_name, plan_of
from safetensors.torch import save

from collapipe.errors import WireError
from collapipe.tensors import Tensors
from device_app import held_segment
from pipeline.remote.replica import Replica

WEIGHT = torch.ones(2, 3)


@pytest.fixture
def replica() -> Iterator[Replica]:
    """Of two blocks with a weight each, after devices were told to do steps 0 to 4."""

    def start(name: str) -> Tensors:
        return {f"{name}.weight": WEIGHT}

    replica = Replica(["blocks.0", "blocks.1"], start)
    replica.told = 4
    yield replica
    replica.close()


def test_a_step_counts_once_all_blocks_are_there(replica: Replica) -> None:
    for block in (0, 1):
        assert replica.step is None
        tensors = {f"blocks.{block}.weight": WEIGHT * 2}
        replica.put(f"blocks.{block}", 3, save(tensors))
    assert replica.step == 3
    assert torch.equal(replica.tensors("blocks.1")["blocks.1.weight"], WEIGHT * 2)


@pytest.mark.parametrize(
    ("name", "step", "tensors"),
    [
        ("blocks.2", 3, {"blocks.2.weight": WEIGHT}),
        ("../blocks.0", 3, {"blocks.0.weight": WEIGHT}),
        ("blocks.0", 5, {"blocks.0.weight": WEIGHT}),
        ("blocks.0", 3, {"blocks.1.weight": WEIGHT}),
        ("blocks.0", 3, {"blocks.0.weight": WEIGHT[:1]}),
        ("blocks.0", 3, {"blocks.0.weight": WEIGHT.long()}),
        ("blocks.0", 3, {"blocks.0.weight": WEIGHT * torch.nan}),
        ("blocks.0", 3, {"blocks.0.weight/exp_avg": WEIGHT * torch.inf}),
        ("blocks.0", 3, {"blocks.0.weight/exp_avg": torch.ones(10**4)}),
    ],
)
def test_what_is_no_block_is_refused(
    replica: Replica, name: str, step: int, tensors: Tensors
) -> None:
    with pytest.raises(WireError):
        replica.put(name, step, save(tensors))
    with pytest.raises(WireError):
        replica.put("blocks.0", 3, b"no tensors")
    assert replica.step is None


def test_a_device_that_sends_other_blocks_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round ends with the bits of an honest one."""
    real = held_segment._training

    def wrong(part: object) -> Tensors:
        tensors = real(part)  # type: ignore[arg-type]
        if lied or not any(name.startswith("blocks.1.") for name in tensors):
            return tensors
        lied.append(True)
        return {name: each * torch.nan for name, each in tensors.items()}

    lied = list[bool]()
    monkeypatch.setattr(held_segment, "_training", wrong)
    plan = plan_of([device_name(k) for k in range(3)], (1, 2, 1))
    with daemons(3) as there:
        assert Work().remote(plan, there).equals(Work().inline(plan))
    assert lied
