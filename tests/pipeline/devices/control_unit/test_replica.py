"""Which block copies and answers a control unit accepts from its devices."""

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
from full_disk import full_disk
from safetensors.torch import save
from torch import nn

from collapipe.errors import StageError, StorageError, WireError
from collapipe.models.lora import LoraSpec
from collapipe.models.part import Part, state_like
from collapipe.models.split import block_name
from collapipe.tensors import Tensors
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.parts import joined, most_bytes
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.block_form import BlockForm
from pipeline.devices.control_unit import segments
from pipeline.devices.control_unit.placement import Placement
from pipeline.devices.control_unit.replica import Replica
from pipeline.devices.daemon.held_segment import HeldSegment
from pipeline.devices.daemon.session import Session
from pipeline.devices.encoding import as_tensor, packed
from pipeline.devices.messages import PartHeader
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.phase_timer import PhaseTimer

WEIGHT = torch.ones(2, 3)
HOLDERS = {"blocks.0": "pi", "blocks.1": "nano"}


def form(weights: Tensors) -> BlockForm:
    """A form of weights that all train."""
    return BlockForm(weights | state_like(ADAMW, weights), frozenset(weights), nn.Identity())


def put(
    replica: Replica, sender: str, epoch: int, block: str, step: int, left: int, data: bytes
) -> None:
    """Give the replica a part of a block from device ``sender``."""
    tensors = packed(PartHeader(block, left)), as_tensor(data)
    replica.put(sender, Frame(FrameKind.PART, 3, step, 0, tensors, epoch))


@pytest.fixture
def replica() -> Iterator[Replica]:
    """A replica of two blocks with a weight each; devices were asked for steps 0 to 4."""

    def start(name: str) -> Tensors:
        return {f"{name}.weight": WEIGHT}

    replica = Replica({name: form(start(name)) for name in HOLDERS}, start, {})
    replica.commanded_step = 4
    replica.expect(2, HOLDERS)
    replica.open()
    yield replica
    replica.close()


def test_a_replica_has_a_folder_only_between_open_and_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an error between creation and opening leaves no folder."""
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


def test_a_full_disk_is_named(replica: Replica) -> None:
    data = save({"blocks.0.weight": WEIGHT})
    with full_disk(), pytest.raises(StorageError, match=rf"{tempfile.gettempdir()}.*TMPDIR"):
        put(replica, "pi", 2, "blocks.0", 3, 0, data)


def test_a_block_may_have_no_tensors() -> None:
    assert form({}).largest_bytes == 0
    replica = Replica({"blocks.0": form({})}, lambda name: {}, {})
    assert replica.most_bytes() == most_bytes(0)


def test_a_step_counts_when_the_copies_of_all_blocks_have_arrived(replica: Replica) -> None:
    for block in (0, 1):
        assert replica.step is None
        tensors = {f"blocks.{block}.weight": WEIGHT * 2}
        put(replica, HOLDERS[f"blocks.{block}"], 2, f"blocks.{block}", 3, 0, save(tensors))
    assert replica.step == 3
    put(replica, "pi", 2, "blocks.0", 3, 0, save({"blocks.0.weight": WEIGHT * 9}))
    assert torch.equal(replica.tensors("blocks.0")["blocks.0.weight"], WEIGHT * 2)
    assert torch.equal(replica.tensors("blocks.1")["blocks.1.weight"], WEIGHT * 2)


def test_a_block_in_parts_counts_with_its_last_part(replica: Replica) -> None:
    """The last part must complete the block; no tensor may arrive twice."""
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
    with pytest.raises(WireError):  # the next device could not load it and would seem faulty
        put(replica, "pi", 2, "blocks.0", 3, 0, save(half))
    put(replica, "pi", 2, "blocks.0", 3, 0, save(last))
    assert replica.step == 3
    assert replica.tensors("blocks.0").keys() == first.keys() | last.keys()


def test_empty_parts_and_metadata_are_not_stored(replica: Replica) -> None:
    """Otherwise many such parts would fill the disk."""
    for left in range(1, 50):
        put(replica, "pi", 2, "blocks.0", 3, left, save({}))
    with pytest.raises(WireError):
        put(
            replica, "pi", 2, "blocks.0", 3, 1, save({"blocks.0.weight": WEIGHT}, {"x": "y" * 2000})
        )
    assert replica._temporary is not None and not [*replica._temporary.path.iterdir()]


def test_copies_of_an_earlier_plan_do_not_complete_a_step(replica: Replica) -> None:
    """A block that arrived under the earlier plan must arrive again."""
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
        ("blocks.1", 3, {"blocks.1.weight": WEIGHT}),  # another device holds it
    ],
)
def test_invalid_blocks_are_refused_and_not_stored(
    replica: Replica, name: str, step: int, tensors: Tensors
) -> None:
    with pytest.raises(WireError):
        put(replica, "pi", 2, name, step, 0, save(tensors))
    with pytest.raises(WireError):
        put(replica, "pi", 2, "blocks.0", 3, 0, b"no tensors")
    assert replica.step is None
    assert replica._temporary is not None and not [*replica._temporary.path.glob("blocks*")]


def test_blocks_of_an_abandoned_plan_are_ignored(replica: Replica) -> None:
    """This is not an error: the device held the block when it sent it."""
    for name in HOLDERS:
        put(replica, "jetson", 1, name, 3, 0, save({f"{name}.weight": WEIGHT}))
    assert replica.step is None


def test_a_device_that_sends_invalid_weights_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round still has the bits of one thread."""
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


def test_a_device_that_sends_no_copies_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control unit keeps the steps since the last copy, so it limits their number."""
    monkeypatch.setattr(segments, "_AHEAD", 1)
    real = Session._send_parts

    def silent(self: Session, frame: Frame) -> None:
        assert self.held is not None
        if self.held.description.stage != 1 or self.held.description.num_segments != 3:
            real(self, frame)

    monkeypatch.setattr(Session, "_send_parts", silent)
    keep_up, passed = segments.RemoteSegments._keep_up, [0.0]

    def keeping_up(self: segments.RemoteSegments) -> None:
        """Advance the clock by a minute at each call after the other devices' blocks have
        arrived."""
        placed, idle = self._placed, self._placed.idle

        def wait() -> None:
            have = self._replica._have.values()
            passed[0] += 60.0 * any({"blocks.0", "blocks.3"} <= names for names in have)
            idle()
            placed.watch.awake_s += passed[0]

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
    """A finished round on one device that is still connected."""
    embedding, _, part = work.parts()
    head = LocalHead(part)
    with (
        daemons(1) as there,
        work.segments(plan_of([device_name(0)], (4,)), there) as remote,
        Pipeline(3, embedding, remote, head, PhaseTimer()) as pipeline,
    ):
        work._trained(pipeline, head)
        yield remote


def test_a_copy_of_a_step_that_was_not_requested_is_refused() -> None:
    with trained(Work(steps=2)) as remote:
        replica = remote._replica
        epoch, _ = replica._expected
        # the replica already has that step
        put(replica, device_name(0), epoch, "blocks.0", 1, 0, b"")
        with pytest.raises(WireError, match="not requested"):
            put(replica, device_name(0), epoch, "blocks.0", 2, 0, b"")


@pytest.mark.parametrize("lies", [False, True])
def test_a_clock_that_was_sent_before_the_request_is_not_used(
    lies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is not lost, but the round then has no times and no traces."""
    real = Session._answer

    def answer(self: Session, frame: Frame, kind: FrameKind, *tensors: torch.Tensor) -> None:
        real(self, frame, kind, *tensors)
        if lies and kind == FrameKind.NORMS:
            real(self, replace(frame, step=0), FrameKind.CLOCK, torch.tensor(0.0).double())

    def set_clocks(self: Placement) -> None:
        """Ask after the unrequested clocks have arrived."""
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


def test_a_copy_holds_only_adapters_and_their_optimiser_state() -> None:
    """The copy of a frozen block is empty."""
    spec = LoraSpec(SMALL, target_modules=("query",), first_block=1)
    work = Work(spec)
    with trained(work) as remote:
        copied = remote._replica._received
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
        # otherwise the device would never count as hung
        (FrameKind.ALIVE, (torch.tensor(torch.nan),)),
        (FrameKind.NORMS, (torch.tensor([1, -9.0]).double(), TIMES, USAGE)),
        (FrameKind.NORMS, (torch.ones(2).double(), TIMES.flip(1), USAGE)),
        (FrameKind.NORMS, (torch.ones(2).double(), TIMES * 1e308, USAGE)),
        (FrameKind.NORMS, (torch.ones(2).double(), TIMES, -USAGE)),
        (FrameKind.READY, (torch.zeros(2**20),)),
    ],
)
def test_a_device_that_sends_an_invalid_answer_is_dropped(
    kind: FrameKind, tensors: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round still has the bits of one thread. Clocks are requested after training, so an
    invalid clock only removes the round's times."""
    send, lied, dropped = FrameStream.send, list[bool](), list[str]()
    without = segments.RemoteSegments._resume_after

    def noted(remote: segments.RemoteSegments, lost: StageError) -> None:
        dropped.append(lost.device)
        without(remote, lost)

    def lying(stream: FrameStream, frame: Frame) -> None:
        sessions = [each._session for each in there]  # and none of an earlier test
        if frame.kind == kind and not lied and any(s and s.control is stream for s in sessions):
            lied.append(True)
            frame = replace(frame, tensors=tensors)
        send(stream, frame)

    monkeypatch.setattr(FrameStream, "send", lying)
    monkeypatch.setattr(segments.RemoteSegments, "_resume_after", noted)
    monkeypatch.setattr("pipeline.devices.daemon.session.ALIVE_S", 0.01)
    plan = plan_of([device_name(k) for k in range(2)], (2, 2))
    with daemons(2) as there:
        found = Work().remote(plan, there, lost=dropped)
    assert found.equals(Work().inline(plan))
    assert lied and len(dropped) == (kind != FrameKind.CLOCK)
