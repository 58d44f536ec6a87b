"""What a control unit takes from its devices, and what it does not."""

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_cluster import ADAMW, SMALL, Work, daemons, device_name, plan_of
from safetensors.torch import save
from torch import nn

from collapipe.errors import StageError, StorageError, WireError
from collapipe.models.lora import LoraSpec
from collapipe.models.part import Part, state_like
from collapipe.models.split import block_name
from collapipe.tensors import Tensors
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.parts import joined, most_bytes
from collapipe.wire.streams import FrameStream
from pipeline.devices.block_form import BlockForm
from pipeline.devices.control_unit import segments
from pipeline.devices.control_unit.placement import Placement
from pipeline.devices.control_unit.replica import Replica
from pipeline.devices.daemon.held_segment import HeldSegment
from pipeline.devices.daemon.session import Session
from pipeline.devices.messages import PartHeader, as_tensor, packed
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.phase_timer import PhaseTimer

WEIGHT = torch.ones(2, 3)
HOLDERS = {"blocks.0": "pi", "blocks.1": "nano"}


def form(weights: Tensors) -> BlockForm:
    """Of weights that all train."""
    return BlockForm(weights | state_like(ADAMW, weights), frozenset(weights), nn.Identity())


def put(
    replica: Replica, sender: str, epoch: int, block: str, step: int, left: int, data: bytes
) -> None:
    """A part of a block that the device ``sender`` sends."""
    tensors = packed(PartHeader(block, left)), as_tensor(data)
    replica.put(sender, Frame(FrameKind.PART, 3, step, 0, tensors, epoch))


@pytest.fixture
def replica() -> Iterator[Replica]:
    """Of two blocks with a weight each, after devices were told to do steps 0 to 4."""

    def start(name: str) -> Tensors:
        return {f"{name}.weight": WEIGHT}

    replica = Replica({name: form(start(name)) for name in HOLDERS}, start, {})
    replica.told = 4
    replica.expect(2, HOLDERS)
    replica.open()
    yield replica
    replica.close()


def test_nothing_lies_about_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What raises between making a replica and opening it leaves no folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    replica = Replica({}, lambda name: {}, {})
    assert not [*tmp_path.iterdir()]
    replica.close()
    replica.open()
    assert len([*tmp_path.iterdir()]) == 1
    replica.close()
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match="TMPDIR"):
        replica.open()


def test_a_block_may_have_no_tensors() -> None:
    assert form({}).largest_bytes == 0
    replica = Replica({"blocks.0": form({})}, lambda name: {}, {})
    assert replica.most_bytes() == most_bytes(0)


def test_a_step_counts_once_all_blocks_are_there(replica: Replica) -> None:
    for block in (0, 1):
        assert replica.step is None
        tensors = {f"blocks.{block}.weight": WEIGHT * 2}
        put(replica, HOLDERS[f"blocks.{block}"], 2, f"blocks.{block}", 3, 0, save(tensors))
    assert replica.step == 3
    put(replica, "pi", 2, "blocks.0", 3, 0, save({"blocks.0.weight": WEIGHT * 9}))
    assert torch.equal(replica.tensors("blocks.0")["blocks.0.weight"], WEIGHT * 2)
    assert torch.equal(replica.tensors("blocks.1")["blocks.1.weight"], WEIGHT * 2)


def test_a_block_comes_in_parts(replica: Replica) -> None:
    """It counts with the last one, which must leave nothing out; none may come twice."""
    first = {"blocks.0.weight": WEIGHT * 2}
    last = {f"blocks.0.weight/{key}": WEIGHT * 3 for key in ("exp_avg", "exp_avg_sq")}
    last["blocks.0.weight/step"] = torch.tensor(1.0)
    put(replica, "pi", 2, "blocks.0", 3, 1, save(first))
    put(replica, "nano", 2, "blocks.1", 3, 0, save({"blocks.1.weight": WEIGHT}))
    assert replica.step is None
    for left in (0, 1):
        with pytest.raises(WireError):
            put(replica, "pi", 2, "blocks.0", 3, left, save(first))
    with pytest.raises(WireError):
        put(replica, "pi", 2, "blocks.0", 4, 0, save(last))
    half = {key: each for key, each in last.items() if not key.endswith("avg_sq")}
    with pytest.raises(WireError):  # the next device could not load it, and would be blamed
        put(replica, "pi", 2, "blocks.0", 3, 0, save(half))
    put(replica, "pi", 2, "blocks.0", 3, 0, save(last))
    assert replica.step == 3
    assert replica.tensors("blocks.0").keys() == first.keys() | last.keys()


def test_parts_of_nothing_are_not_kept(replica: Replica) -> None:
    """Nor what is said beside tensors: any number of such parts would fill the disk."""
    for left in range(1, 50):
        put(replica, "pi", 2, "blocks.0", 3, left, save({}))
    with pytest.raises(WireError):
        put(
            replica, "pi", 2, "blocks.0", 3, 1, save({"blocks.0.weight": WEIGHT}, {"x": "y" * 2000})
        )
    assert replica._temporary is not None and not [*replica._temporary.path.iterdir()]


def test_another_plan_begins_with_complete_steps(replica: Replica) -> None:
    """Half of a step of the plan before does not count."""
    put(replica, "pi", 2, "blocks.0", 3, 0, save({"blocks.0.weight": WEIGHT * 2}))
    replica.expect(3, HOLDERS)
    put(replica, "nano", 3, "blocks.1", 3, 0, save({"blocks.1.weight": WEIGHT * 3}))
    assert replica.step is None
    put(replica, "pi", 3, "blocks.0", 3, 0, save({"blocks.0.weight": WEIGHT * 4}))
    assert replica.step == 3
    assert torch.equal(replica.tensors("blocks.0")["blocks.0.weight"], WEIGHT * 4)


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
        ("blocks.0", 3, {"blocks.0.weight": WEIGHT, "blocks.0.weight/other": WEIGHT + 1}),
        ("blocks.0", 3, {}),
        ("blocks.0", 3, {"blocks.0.weight": WEIGHT.double()}),
        ("blocks.0", 3, {f"blocks.0.weight/{k}": WEIGHT.clone() for k in range(20_000)}),
        ("blocks.1", 3, {"blocks.1.weight": WEIGHT}),  # which another device holds
    ],
)
def test_what_is_no_block_is_refused(
    replica: Replica, name: str, step: int, tensors: Tensors
) -> None:
    with pytest.raises(WireError):
        put(replica, "pi", 2, name, step, 0, save(tensors))
    with pytest.raises(WireError):
        put(replica, "pi", 2, "blocks.0", 3, 0, b"no tensors")
    assert replica.step is None
    assert replica._temporary is not None and not [*replica._temporary.path.glob("blocks*")]


def test_a_plan_that_was_given_up_adds_nothing(replica: Replica) -> None:
    """Nobody lied: the device held the block when it sent it."""
    for name in HOLDERS:
        put(replica, "jetson", 1, name, 3, 0, save({f"{name}.weight": WEIGHT}))
    assert replica.step is None


def test_a_device_that_sends_other_blocks_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round ends with the bits of an honest one."""
    real, lied = HeldSegment._packed, list[bool]()

    def wrong(segment: HeldSegment, part: Part, names: Sequence[str]) -> torch.Tensor:
        if lied or part.name != "blocks.1":
            return real(segment, part, names)
        lied.append(True)
        trained = segment._trained(part)
        return joined({name: trained[name] * torch.nan for name in names})

    monkeypatch.setattr(HeldSegment, "_packed", wrong)
    plan = plan_of([device_name(k) for k in range(3)], (1, 2, 1))
    with daemons(3) as there:
        found = Work().remote(plan, there, lost=[device_name(1)])
    assert found.equals(Work().inline(plan))
    assert lied


def test_a_device_that_sends_no_blocks_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the steps since, which are kept for another device, are too many."""
    monkeypatch.setattr(segments, "_AHEAD", 1)
    real = Session._send_parts

    def silent(self: Session, frame: Frame) -> None:
        assert self.held is not None
        if self.held.description.stage != 1 or self.held.description.num_segments != 3:
            real(self, frame)

    monkeypatch.setattr(Session, "_send_parts", silent)
    keep_up, passed = segments.RemoteSegments._keep_up, [0.0]

    def keeping_up(self: segments.RemoteSegments) -> None:
        """A minute passes at each look once the other devices' blocks are there."""
        placed, idle = self._placed, self._placed.idle

        def wait() -> None:
            have = self._replica._have.values()
            passed[0] += 60.0 * any({"blocks.0", "blocks.3"} <= names for names in have)
            idle()
            placed.awake_s += passed[0]

        with monkeypatch.context() as patch:
            patch.setattr(placed, "idle", wait)
            keep_up(self)

    monkeypatch.setattr(segments.RemoteSegments, "_keep_up", keeping_up)
    plan, work = plan_of([device_name(k) for k in range(3)], (1, 2, 1)), Work(steps=6)
    with daemons(3) as there:
        found = work.remote(plan, there, lost=[device_name(1)])
    assert found.equals(work.inline(plan))
    assert passed[0]


@contextmanager
def trained(work: Work) -> Iterator[segments.RemoteSegments]:
    """A round at its end, on one device that is still connected."""
    embedding, _, part = work.parts()
    head = LocalHead(part)
    with (
        daemons(1) as there,
        work.segments(plan_of([device_name(0)], (4,)), there) as remote,
        Pipeline(3, embedding, remote, head, PhaseTimer()) as pipeline,
    ):
        work._trained(pipeline, head)
        yield remote


def test_no_copy_is_taken_of_a_step_that_devices_were_not_told_to_do() -> None:
    with trained(Work(steps=2)) as remote:
        replica = remote._replica
        epoch, _ = replica._expected
        put(replica, device_name(0), epoch, "blocks.0", 1, 0, b"")  # it has that step
        with pytest.raises(WireError, match="not requested"):
            put(replica, device_name(0), epoch, "blocks.0", 2, 0, b"")


@pytest.mark.parametrize("lies", [False, True])
def test_a_clock_that_was_sent_before_it_was_asked_for_is_not_used(
    lies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round then has no times; its bits are those of an honest one."""
    real = Session._answer

    def answer(self: Session, frame: Frame, kind: FrameKind, *tensors: torch.Tensor) -> None:
        real(self, frame, kind, *tensors)
        if lies and kind == FrameKind.NORMS:
            real(self, replace(frame, step=0), FrameKind.CLOCK, torch.tensor(0.0).double())

    def set_clocks(self: Placement) -> None:
        """Ask once the lies are there."""
        for device in self.members if lies else ():
            while device._answers.empty():
                time.sleep(0.01)
        ask(self)

    ask = Placement.set_clocks
    monkeypatch.setattr(Placement, "set_clocks", set_clocks)
    monkeypatch.setattr(Session, "_answer", answer)
    with trained(Work()) as remote:
        assert not remote.lost
        assert (remote.step_times() is None) == lies
        assert (not remote.traces()) == lies


def test_a_copy_has_adapters_and_their_state_alone() -> None:
    """And nothing of a block that is frozen."""
    spec = LoraSpec(SMALL, target_modules=("query",), first_block=1)
    work = Work(spec)
    with trained(work) as remote:
        copied = remote._replica._came
    for name in map(block_name, range(4)):
        (keys,) = copied[name, work.steps - 1].values() or [set[str]()]
        weight = f"{name}.attention.query.lora_{{}}.default.weight"
        kinds = "", "/exp_avg", "/exp_avg_sq", "/step"
        own = {weight.format(half) + kind for half in "AB" for kind in kinds}
        assert keys == (own if name != "blocks.0" else set())


TIMES = torch.arange(4.0).double().expand(6, 4)
USAGE = torch.ones(2).double()


NONSENSE = (), (WEIGHT, WEIGHT), (torch.full((8, 3), torch.nan).double(),) * 2
ANSWERS = FrameKind.NORMS, FrameKind.CLOCK, FrameKind.ALIVE


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [
        *zip(ANSWERS, NONSENSE, strict=True),
        *(
            pytest.param(kind, tensors, marks=pytest.mark.thorough)
            for kind, tensors in itertools.product(ANSWERS, NONSENSE)
        ),
        (FrameKind.CLOCK, (torch.tensor(torch.nan),)),
        (FrameKind.ALIVE, (torch.tensor(torch.nan),)),  # else it would never count as hung
        (FrameKind.NORMS, (torch.tensor([1, -9.0]).double(), TIMES, USAGE)),
        (FrameKind.NORMS, (torch.ones(2).double(), TIMES.flip(1), USAGE)),
        (FrameKind.NORMS, (torch.ones(2).double(), TIMES * 1e308, USAGE)),
        (FrameKind.NORMS, (torch.ones(2).double(), TIMES, -USAGE)),
        (FrameKind.READY, (torch.zeros(2**20),)),
    ],
)
def test_a_device_that_answers_nonsense_is_done_without(
    kind: FrameKind, tensors: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round ends with the bits of an honest one. A wrong clock, which is asked for when all is
    done, costs the round's times alone."""
    send, lied, gone = FrameStream.send, list[bool](), list[str]()
    without = segments.RemoteSegments._resume_after

    def noted(remote: segments.RemoteSegments, lost: StageError) -> None:
        gone.append(lost.device)
        without(remote, lost)

    def lying(stream: FrameStream, frame: Frame) -> None:
        if frame.kind == kind and not lied and stream.peer.startswith("control unit"):
            lied.append(True)
            frame = replace(frame, tensors=tensors)
        send(stream, frame)

    monkeypatch.setattr(FrameStream, "send", lying)
    monkeypatch.setattr(segments.RemoteSegments, "_resume_after", noted)
    monkeypatch.setattr("pipeline.devices.daemon.session.ALIVE_S", 0.01)
    plan = plan_of([device_name(k) for k in range(2)], (2, 2))
    with daemons(2) as there:
        found = Work().remote(plan, there, lost=gone)
    assert found.equals(Work().inline(plan))
    assert lied and len(gone) == (kind != FrameKind.CLOCK)
