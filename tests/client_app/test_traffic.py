"""The bytes of a step over the decoder link are known exactly, for real padded batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from decoder_session import decoder_session
from frame_bytes import encode
from hypothesis import given
from hypothesis import strategies as st
from sections import link_settings

from client_app.cluster_state import LinkFormat, LinkTraffic, sampled_steps
from client_app.link import DecoderLink, LinkPrecisions
from collapipe.data.shards import batch_rows
from collapipe.models.dropout import DropoutKey
from collapipe.models.sent_rows import RowsRead
from collapipe.tensors import IGNORED, Batch, mask_of, padded
from collapipe.wire import frames
from collapipe.wire.compression import codec
from collapipe.wire.compression.feedback import ActivationMemory, ChangeCoder
from collapipe.wire.frames import Frame, FrameKind
from pipeline.micro_batch import split
from server_app.decoding.link import DecoderLinkServer

PRECISIONS = ["float32", "bfloat16", "int8", "int6", "int4"]
precisions = st.sampled_from(PRECISIONS)
forms = st.builds(
    LinkFormat,
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.float64]),
    precisions,
    st.builds(RowsRead, st.sampled_from(["first", "labelled", "real", "every"]), st.integers(0, 2)),
    st.booleans(),
)
sizes = st.integers(1, 6)


@dataclass(frozen=True)
class Rows:
    """Pairs of unequal lengths; some targets end with ignored positions."""

    sources: Sequence[int]
    targets: Sequence[int]

    @property
    def lengths(self) -> Sequence[int]:
        return self.sources

    def batch(self, rows: Sequence[int]) -> Batch:
        sources = [[3] * self.sources[row] for row in rows]
        places = torch.tensor(list(rows))
        targets = [[4] * self.targets[row] + [IGNORED] * (row % 3) for row in rows]
        return Batch(padded(sources, 0), mask_of(sources), padded(targets, IGNORED), places)

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        raise NotImplementedError


rows = st.lists(st.tuples(sizes, sizes), min_size=1, max_size=20).map(
    lambda pairs: Rows(*zip(*pairs, strict=True))
)


def sent(form: LinkFormat, micro_batches: Sequence[Batch], precision: str) -> tuple[int, int]:
    """Return the bytes of a step's frames, and of its answers' frames."""

    def length(*tensors: torch.Tensor) -> int:
        return len(encode(Frame(FrameKind.ACTIVATION, 1, 2, 3, tensors)))

    up, down = length(torch.zeros(2).long()) + length(torch.zeros(form.num_parts).double()), 0
    for part in micro_batches:
        samples, tokens = part.mask.shape
        hidden = torch.randn(samples, tokens + form.rows.extra, form.dim).to(form.dtype)
        hidden = hidden[form.rows.of(part.mask, part.targets)]
        numbers = [torch.zeros(samples).long()] if form.feedback else []
        parts = codec.encode(hidden, precision)
        up += length(*numbers, *parts, part.mask, part.targets)
        loss = torch.zeros((), dtype=torch.float64)
        down += length(loss, *codec.encode(hidden, form.gradient))
    return up, down


@given(forms, precisions, st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=4))
def test_predicted_bytes_of_a_step_equal_its_frames(
    form: LinkFormat, precision: str, shapes: list[tuple[int, int, int]]
) -> None:
    """For every shape, width, dtype and precision."""
    parts = [
        Batch(torch.ones(b, s).long(), torch.ones(b, s).bool(), torch.ones(b, t).long())
        for b, s, t in shapes
    ]
    assert (form.step(parts, precision), form.answers(parts)) == sent(form, parts, precision)


@given(forms, precisions, rows, sizes, sizes, st.integers(0, 2**31))
def test_the_expectation_is_the_mean_of_an_epochs_steps(
    form: LinkFormat,
    precision: str,
    examples: Rows,
    batch_size: int,
    num_micro_batches: int,
    seed: int,
) -> None:
    """With padding. An epoch ends when too few new rows remain for a batch."""
    left, steps = set(range(len(examples.lengths))), list[tuple[int, int]]()
    while len(left) >= min(batch_size, len(examples.lengths)):
        drawn = batch_rows(examples.lengths, batch_size, len(steps), seed).tolist()
        assert left.issuperset(drawn)
        left -= set(drawn)
        parts = split(examples.batch(drawn), num_micro_batches)
        steps.append(sent(form, parts, precision))
    sampled = sampled_steps(examples, batch_size, num_micro_batches, seed)
    traffic = LinkTraffic(form, 3, sampled, None)
    bits = traffic.up_bits(precision), traffic.down_bits
    assert bits == pytest.approx(24 * np.mean(steps, axis=0))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("feedback", [False, True])
def test_predicted_bytes_of_a_round_equal_the_links_count(
    num_micro_batches: int, precision: str, feedback: bool
) -> None:
    """Between a real unit and a real server. With feedback, the second step sends changes of rows 0
    and 1."""
    down = PRECISIONS[-1 - PRECISIONS.index(precision)]
    form = LinkFormat(3, 8, torch.float32, down, RowsRead("real"), feedback)
    batches = [Rows([5, 3, 2], [2, 4, 1]).batch([0, 1, 2]), Rows([1, 1], [3, 3]).batch([0, 1])]
    options = f"compression.activation={precision}", f"compression.gradient={down}"
    options += (f"compression.feedback={str(feedback).lower()}",)
    session = decoder_session(0, 1, "task.max_length=9", *options)
    coder = ChangeCoder(ActivationMemory(), 1, 3) if feedback else None
    how = LinkPrecisions(precision, down, coder)
    with (
        DecoderLinkServer(link_settings(), 1) as server,
        DecoderLink(server.open(session), 0, 1, link_settings(), form.rows, how) as link,
    ):
        for step, batch in enumerate(batches):
            parts = split(batch, num_micro_batches)
            link.begin(DropoutKey(0, 0, step), parts, batch.num_targets)
            for index, each in enumerate(parts):
                link.submit(index, torch.randn(*each.mask.shape, 8))
                link.answer(index)
            link.exchange_norms([1.0] * 3)
    steps = [split(batch, num_micro_batches) for batch in batches]
    assert sum(form.step(each, precision) for each in steps) == link.bytes_up
    norms = frames.num_bytes([(torch.float64, (1,))])  # the head's norm
    assert link.bytes_down == sum(map(form.answers, steps)) + len(steps) * norms
