"""Daemons in this process, a small model, and rounds that train it on daemons or in one thread."""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

import collapipe
from collapipe.credentials.authority import temporary_authority
from collapipe.credentials.credentials import load
from collapipe.errors import RoundFailedError
from collapipe.models.description import describe
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import HeadPart, Part, clip_scale
from collapipe.models.split import ModelSpec, SplitModel, build_empty
from collapipe.models.transformer import TransformerSpec
from collapipe.plan import ClusterPlan
from collapipe.sections import OptimizerSettings
from collapipe.state import Precision
from collapipe.tensors import IGNORED, Batch, Tensors
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.streams.channels import Channels, Dialer
from pipeline.devices.block_form import block_forms
from pipeline.devices.control_unit.connection import Cluster
from pipeline.devices.control_unit.replica import Replica, starting_with
from pipeline.devices.control_unit.segments import RemoteSegments
from pipeline.devices.daemon.server import Daemon, DeviceSettings
from pipeline.devices.messages import RoundDescription
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.inline import inline_pipeline
from pipeline.micro_batch import split as micro_batches_of
from pipeline.phase_timer import PhaseTimer
from pipeline.segment import first_trained
from tests.sections import optimizer_settings
from tests.split_parts import model_of, parts_of, segments_of

VOCABULARY = Vocabulary(size=13, pad=0, bos=1, eos=2)
UNIT, ROUND, SEED, RATE, CLIP = 1, 3, 5, 0.01, 0.1
SMALL = TransformerSpec(4, 1, 16, 2, 24, 0.3)
# AdamW divides by eps: a tiny eps would magnify rounding errors of gradients that should be 0.
ADAMW = optimizer_settings(eps=1e-4, weight_decay=0.1)
INSECURE = Dialer(None)


def plan_of(
    names: Sequence[str], cut: Sequence[int], num_micro_batches: int = 3, schedule: str = "gpipe"
) -> ClusterPlan:
    """Return a plan with ``cut[k]`` consecutive blocks on the k-th device."""
    return ClusterPlan(UNIT, segments_of(cut, names), num_micro_batches, schedule)


def even_plan(names: Sequence[str], num_blocks: int, like: ClusterPlan) -> ClusterPlan:
    """Divide the blocks evenly; if a remainder is left, the first devices hold one more."""
    used = names[:num_blocks]
    each, more = divmod(num_blocks, len(used))
    cut = [each + (k < more) for k in range(len(used))]
    return plan_of(used, cut, like.num_micro_batches, like.schedule)


def ragged(num_samples: int = 5) -> Batch:
    """Return up to five samples whose sources and targets differ in length, in different orders."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randint(3, VOCABULARY.size, (num_samples, 7), generator=generator)
    targets = torch.randint(2, VOCABULARY.size, (num_samples, 6), generator=generator)
    mask = torch.arange(7) < torch.tensor([4, 7, 1, 5, 2])[:num_samples, None]
    real = torch.arange(6) < torch.tensor([6, 2, 3, 1, 5])[:num_samples, None]
    return Batch(inputs, mask, targets.masked_fill(~real, IGNORED))


@dataclass(frozen=True)
class NumberedKey(DropoutKey):
    """Draws dropout masks for ``micro_batch``; the unsplit model asks for micro-batch 0."""

    micro_batch: int

    def generator(self, part: str, micro_batch: int) -> torch.Generator:
        return DropoutKey(self.seed, self.unit, self.step).generator(part, self.micro_batch)


@dataclass(frozen=True)
class Result:
    """The losses, gradient norms and tensors of a round."""

    losses: list[float]
    norms: list[float]
    tensors: Tensors  # weights and optimiser state of all parts

    def equals(self, other: "Result") -> bool:
        """Return whether all bits are equal."""
        return (
            (self.losses, self.norms) == (other.losses, other.norms)
            and self.tensors.keys() == other.tensors.keys()
            and all(torch.equal(each, other.tensors[key]) for key, each in self.tensors.items())
        )


class Listening(Protocol):
    """A daemon in this process or another one."""

    @property
    def address(self) -> str:
        """HOST:PORT."""


@dataclass
class Work:
    """A model, its initial weights, and the batch that it trains on."""

    spec: ModelSpec = SMALL
    vocabulary: Vocabulary = VOCABULARY
    batch: Batch = field(default_factory=ragged)
    optimizer: OptimizerSettings = ADAMW
    steps: int = 2
    hung_s: float = 20.0
    recompute: bool = False
    state: Tensors = field(default_factory=dict)  # initial optimiser state
    relay: bool = False  # the control unit relays hops
    wire_dtype: Precision = "float32"
    needed_bytes: float = 0.0  # planned bytes of each segment

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        model = SplitModel(self.spec, self.vocabulary)
        self.start: Tensors = {name: each.clone() for name, each in model.state_dict().items()}

    def parts(self) -> tuple[Part, list[Part], HeadPart]:
        """Return embedding, blocks and head, with copies of the initial weights."""
        model = model_of(self.spec, self.start, self.vocabulary)
        return parts_of(model, self.optimizer, self.state)

    def after(self, round_: Result) -> "Work":
        """Return the work of a round that continues from the result of ``round_``."""
        again = copy.copy(self)
        again.start = {name: each for name, each in round_.tensors.items() if "/" not in name}
        again.state = {name: each for name, each in round_.tensors.items() if "/" in name}
        return again

    def unsplit(self, num_micro_batches: int) -> Result:
        """Train the unsplit model for a round with torch's backward, one micro-batch after the
        other."""
        embedding, blocks, head = self.parts()
        parts = [embedding, *blocks, head]
        model = build_empty(lambda: SplitModel(self.spec, self.vocabulary), dict(self.start))
        assert isinstance(model, SplitModel)
        for part in parts:
            model.set_submodule(part.name, part.module)
        losses, norms = [], []
        for step in range(self.steps):
            loss = 0.0
            for number, each in enumerate(micro_batches_of(self.batch, num_micro_batches)):
                own = (
                    model.loss(each, NumberedKey(SEED, UNIT, step, number)) / self.batch.num_targets
                )
                own.backward()  # type: ignore[no-untyped-call]
                loss += float(own.detach())
            squared = [part.squared_norm() for part in parts]
            for part in parts:
                part.step(RATE, clip_scale(squared, CLIP))
            losses.append(loss)
            norms.append(sum(squared))
        kept = [part.weights() | part.optimizer_state() for part in parts]
        return Result(losses, norms, {name: each for part in kept for name, each in part.items()})

    def inline(self, plan: ClusterPlan) -> Result:
        """Train a round in one thread."""
        embedding, blocks, part = self.parts()
        head = LocalHead(part)
        how = self.recompute, self.wire_dtype
        with inline_pipeline(plan, embedding, blocks, head, *how) as pipeline:
            return self._trained(pipeline, head)

    def remote(
        self,
        plan: ClusterPlan,
        daemons: Sequence[Listening],
        every: int = 1,
        dialer: Dialer = INSECURE,
        kept: Channels | None = None,
        head_of: Callable[[HeadPart], LocalHead] = LocalHead,
        lost: Collection[str] = (),
        takes_over: int = 0,
    ) -> Result:
        """Train a round on daemons; after a loss, the remaining devices share the blocks evenly.

        Fails unless exactly the devices ``lost`` were lost: equal bits do not show a loss. If the
        plan has shares, several plans may keep the shares of a lost segment; ``takes_over`` is the
        number of the plan to use.
        """
        embedding, _, part = self.parts()
        head = head_of(part)
        with self.segments(plan, daemons, every, dialer, kept, takes_over) as segments:
            m = plan.num_micro_batches
            with Pipeline(m, embedding, segments, head, PhaseTimer()) as pipeline:
                result = self._trained(pipeline, head)
            assert set(segments.lost) == set(lost), segments.events
            return result

    @contextmanager
    def segments(
        self,
        plan: ClusterPlan,
        daemons: Sequence[Listening],
        every: int = 1,
        dialer: Dialer = INSECURE,
        kept: Channels | None = None,
        takes_over: int = 0,
    ) -> Iterator[RemoteSegments]:
        """Yield the encoder's segments on daemons; ``kept`` are channels of earlier rounds."""
        names = [device_name(k) for k in range(len(daemons))]
        roster = {
            name: DeviceAddress(name, daemon.address)
            for name, daemon in zip(names, daemons, strict=True)
        }

        def without(lost: Collection[str], refused: object) -> ClusterPlan:
            left = [name for name in names if name not in lost]
            if not left:
                raise RoundFailedError("no device is left")
            if plan.shares:
                if not (plans := list(plan.without(lost, plan.unused(left)))):
                    raise RoundFailedError("no other device can take over the segment")
                return plans[takes_over % len(plans)]
            return even_plan(left, self.spec.num_blocks, plan)

        embedding, parts, _ = self.parts()
        common = RoundDescription(
            version=collapipe.__version__,
            unit=UNIT,
            round=ROUND,
            seed=SEED,
            model=describe(self.spec),
            recompute=self.recompute,
            wire_dtype=self.wire_dtype,
            dtype="float32",
            optimizer=self.optimizer,
            replicate_every=every,
            first_trained=first_trained(embedding.trains, (part.trains for part in parts)),
        )
        blocks = range(self.spec.num_blocks)
        forms = block_forms(self.spec, blocks, self.optimizer, torch.float32)
        replica = Replica(forms, starting_with(self.start, self.state), {})
        with ExitStack() as stack:
            channels = kept or stack.enter_context(Channels(dialer))
            cluster = Cluster(
                roster,
                channels,
                without,
                lambda _: self.hung_s,
                self.relay,
                lambda *_: self.needed_bytes,
            )
            made = RemoteSegments(plan, cluster, common, self.spec, replica, PhaseTimer())
            yield stack.enter_context(made)

    def _trained(self, pipeline: Pipeline, head: LocalHead) -> Result:
        losses, norms = [], []
        for step in range(self.steps):
            losses.append(pipeline.run(self.batch, DropoutKey(SEED, UNIT, step)))
            norms.append(pipeline.step(RATE, CLIP))
        tensors = pipeline.weights() | pipeline.optimizer_state()
        tensors |= head.weights() | head.optimizer_state()
        return Result(losses, norms, {name: each.clone() for name, each in tensors.items()})


def device_name(number: int) -> str:
    """Return the name of the number-th daemon."""
    return f"device-{number}"


@contextmanager
def daemons(
    count: int,
    memory_bytes: float = 1e9,
    folder: Path | None = None,
    model: str | None = None,
) -> Iterator[list[Daemon]]:
    """Start daemons on loopback, without encryption unless there is a ``folder`` for credentials.
    Each daemon loads frozen weights from ``model``."""
    names = [device_name(k) for k in range(count)]
    known = temporary_authority(folder, names) if folder else {}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Daemon(
                    DeviceSettings(name, "127.0.0.1:0", memory_bytes, model=model),
                    load(known[name]) if known else None,
                )
            )
            for name in names
        ]


def neighbours(there: Sequence[Daemon]) -> list[DeviceAddress]:
    """Return the daemons' names and addresses."""
    return [DeviceAddress(device_name(k), daemon.address) for k, daemon in enumerate(there)]
