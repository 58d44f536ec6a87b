"""A round on daemons has the bits of the round in one thread and of the unsplit model."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import device_cluster
import pytest
import torch
from device_cluster import (
    CLIP,
    RATE,
    SEED,
    SMALL,
    UNIT,
    Result,
    Work,
    daemons,
    device_name,
    plan_of,
)
from huggingface import VOCABULARY, batch_for, spec_of

from collapipe.models.dropout import DropoutKey
from collapipe.models.lora import LoraSpec
from collapipe.models.stem import StemSpec
from collapipe.state import Precision
from collapipe.tensors import Tensors
from pipeline.devices.daemon.server import Daemon
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.phase_timer import PhaseTimer
from pipeline.schedule import SCHEDULES
from tests.thorough import chosen

NAMES = [device_name(k) for k in range(4)]


@pytest.mark.parametrize(
    ("cut", "schedule"),
    chosen(
        itertools.product([(4,), (1, 3), (2, 1, 1), (1, 1, 1, 1)], SCHEDULES),
        [
            ((4,), "gpipe"),
            ((1, 3), "one_f_one_b"),
            ((2, 1, 1), "gpipe"),
            ((1, 1, 1, 1), "one_f_one_b"),
        ],
    ),
)
def test_a_round_on_devices_has_the_bits_of_one_thread(cut: tuple[int, ...], schedule: str) -> None:
    """Losses, norms, weights and optimiser state after two steps, with dropout."""
    work, plan = Work(), plan_of(NAMES, cut, 3, schedule)
    with daemons(len(cut)) as there:
        assert work.remote(plan, there).equals(work.inline(plan))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_relayed_hops_do_not_change_the_bits(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, plan = Work(relay=True), plan_of(NAMES, (2, 1, 1), 3, schedule)
    monkeypatch.setattr(Daemon, "_dial", None)
    with daemons(3) as there:
        assert work.remote(plan, there).equals(work.inline(plan))


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_rounded_hops_have_the_bits_of_one_thread(precision: Precision) -> None:
    work, plan = Work(wire_dtype=precision), plan_of(NAMES, (2, 1, 1))
    with daemons(3) as there:
        rounded = work.remote(plan, there)
    assert rounded.equals(work.inline(plan))
    assert not rounded.equals(Work().inline(plan))


@pytest.fixture(scope="module")
def two() -> Iterator[list[Daemon]]:
    with daemons(2) as there:
        yield there


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Work]:
    t5 = spec_of(tmp_path_factory.mktemp("t5"), "t5", "decoder")
    return {
        "ours": Work(steps=1),
        # its blocks share a table of position biases
        "t5": Work(t5, VOCABULARY, batch_for("decoder"), steps=1),
        "lora": Work(LoraSpec(SMALL, rank=2, alpha=4.0), steps=1),
        "frozen block": Work(LoraSpec(SMALL, rank=2, alpha=4.0, first_block=1), steps=1),
        "stem": Work(StemSpec(replace(SMALL, num_blocks=5), 1), steps=1),
    }


@pytest.fixture(scope="module")
def unsplit(works: dict[str, Work]) -> Callable[[str], Result]:
    return functools.cache(lambda kind: two_rounds(works[kind], lambda work: work.unsplit(3)))


def two_rounds(work: Work, run: Callable[[Work], Result]) -> Result:
    return run(work.after(run(work)))


@pytest.mark.parametrize(
    ("kind", "schedule", "recompute"),
    chosen(
        [  # each other kind with each schedule, with and without recomputing
            *itertools.product(["ours"], SCHEDULES, (False, True)),
            *(("t5", schedule, schedule != "one_f_one_b") for schedule in SCHEDULES),
            *(("lora", schedule, schedule == "one_f_one_b") for schedule in SCHEDULES),
            *itertools.product(["frozen block", "stem"], SCHEDULES, (False, True)),
        ],
        [  # each schedule and kind, with and without recomputing
            ("ours", "gpipe", False),
            ("ours", "one_f_one_b", True),
            ("t5", "one_f_one_b", False),
            ("lora", "gpipe", True),
            ("frozen block", "one_f_one_b", False),
            ("stem", "gpipe", False),
        ],
    ),
)
def test_two_rounds_have_the_bits_of_the_unsplit_model(
    works: dict[str, Work],
    unsplit: Callable[[str], Result],
    two: list[Daemon],
    kind: str,
    schedule: str,
    recompute: bool,
) -> None:
    """Inline and on daemons, with an uneven cut, dropout and kept optimiser state. On daemons the
    plan makes the second segment recompute."""
    work, plan = replace(works[kind], recompute=recompute), plan_of(NAMES, (1, 3), 3, schedule)
    assert two_rounds(work, lambda each: each.inline(plan)).equals(unsplit(kind))
    first, second = plan.segments
    plan = replace(plan, segments=(first, replace(second, recomputing=(second.device,))))
    assert two_rounds(work, lambda each: each.remote(plan, two)).equals(unsplit(kind))


def sent_bytes(work: Work, two: list[Daemon]) -> tuple[list[float], Tensors]:
    """The bytes that each device sends in a step, and the blocks' weights after the step."""
    plan = plan_of(NAMES, (1, 3))
    embedding, _, head = work.parts()
    with (
        work.segments(plan, two) as segments,
        Pipeline(3, embedding, segments, LocalHead(head), PhaseTimer()) as pipeline,
    ):
        pipeline.run(work.batch, DropoutKey(SEED, UNIT, 0))
        pipeline.step(RATE, CLIP)
        return [each.sent_bytes for each in segments.measured()], segments.weights()


@pytest.mark.parametrize(
    ("kind", "saves"), [("lora", [True, False]), ("frozen block", [True, True])]
)
def test_gradients_that_no_weight_needs_are_not_sent(
    works: dict[str, Work],
    two: list[Daemon],
    kind: str,
    saves: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With LoRA, the first device sends none to the frozen embedding. With a frozen first block,
    the second device sends none either."""
    sent, weights = sent_bytes(works[kind], two)
    monkeypatch.setattr(device_cluster, "first_trained", lambda *parts: -1)
    all_sent, same = sent_bytes(works[kind], two)
    assert [less < 0.55 * more for less, more in zip(sent, all_sent, strict=True)] == saves
    assert weights.keys() == same.keys()
    assert all(torch.equal(each, same[name]) for name, each in weights.items())
