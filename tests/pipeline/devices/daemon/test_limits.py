"""A daemon refuses invalid requests of a certified control unit quickly, with a one-line error."""

import json
import math
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from device_cluster import SMALL, daemons
from hostile_peer import (
    PATIENCE_S,
    HostileUnit,
    RawStream,
    described,
    description_of,
    loading,
    numbers,
    recorded,
)
from safetensors.torch import load, save
from torch import nn

from collapipe.errors import LinkError, WireError
from collapipe.models.description import describe, from_description
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.pieces import PIECE_BYTES
from pipeline.devices.encoding import as_bytes, as_tensor, packed
from pipeline.devices.messages import (
    BEFORE,
    BEHIND,
    HOP,
    NEIGHBOUR,
    SESSION,
    SHARE,
    PartHeader,
    neighbour_name,
    secret_for,
)

MB = 2**20
OURS = describe(SMALL)
DEEP: dict[str, Any] = {"kind": "lora", "base": OURS, "target_modules": ["query"]}
for _ in range(50):
    DEEP = {"kind": "lora", "base": DEEP, "target_modules": ["base_layer"]}
MODELS: list[dict[str, Any]] = [
    *({**OURS, name: value} for name in ("dim", "num_heads") for value in (-2, 0, 2**40, 10**30)),
    *({**OURS, "num_blocks": value} for value in (-1, 513, 10**6, 10**9)),
    {**OURS, "feed_forward_dim": 10**12},
    {**OURS, "feed_forward_dim": [16] * 10},
    {**OURS, "norm": "x" * 10**5},
    {"kind": "stem", "base": OURS, "frozen_blocks": -(10**9)},
    {"kind": "cut", "base": OURS, "num_blocks": 10**9},
    {"kind": "lora", "base": OURS, "rank": 2**40},
    {
        "kind": "stem",
        "base": {"kind": "stem", "base": OURS, "frozen_blocks": 1},
        "frozen_blocks": 1,
    },
    DEEP,
]
PEER = {"address": {"name": "x", "address": "y"}, "neighbour": "behind-0", "secret": "z"}
OTHERS: list[dict[str, Any]] = [
    {"span": {"first": 0, "blocks": 10**9}},
    {"span": {"first": -5, "blocks": 2}},
    {"num_segments": 10**9, "num_micro_batches": 4096},
    {"num_segments": 512, "num_micro_batches": 4096},
    {"num_micro_batches": 0},
    {"stage": -1},
    {"first_trained": -2},
    {"epoch": 2**16},
    {"round": 2**32},
    {"seed": 10**300},
    {"memory_bytes": math.nan},
    {"memory_bytes": 1e300},
    {"session": "x" * 10**5},
    {"peers": [dict(PEER, address={"name": "x", "address": "y" * 10**5})]},
    {"peers": [dict(PEER, neighbour="behind-1")]},
    {"rows_before": [1] * 200},
    {"rows_behind": [0]},
    {"dtype": "object"},
    {"wire_dtype": "int4"},
    {"version": "9" * 10**6},
]


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    """Recorded frames of a round on one device."""
    return recorded()


@pytest.fixture
def unit() -> Iterator[HostileUnit]:
    """A control unit, connected to a daemon that provides 20 MB."""
    with daemons(1, memory_bytes=20e6) as (daemon,), HostileUnit(daemon.address) as unit:
        yield unit


def nested(depth: int) -> Frame:
    """A description with a deeply nested list."""
    text = b'{"model":' + b"[" * depth + b"]" * depth + b"}"
    return Frame(FrameKind.LOAD, 3, 0, 0, (as_tensor(text),))


def test_invalid_descriptions_are_refused_within_4_s_and_30_mb(
    unit: HostileUnit, frames: list[Frame]
) -> None:
    honest = loading(frames)[0]
    tree = description_of(honest)
    hostile = [{**tree, "model": each} for each in MODELS] + [{**tree, **each} for each in OTHERS]
    before, began = psutil.Process().memory_info().rss, time.process_time()
    for number, each in enumerate(hostile, 1):
        unit.control.send_frame(described(honest, each))
        assert not unit.settled() or len(unit.troubles) == number, json.dumps(each)[:200]
        if len(unit.troubles) < number:  # it exceeded the limits of any message
            unit.troubles.append("")
    for depth in (300, 10**5):
        unit.control.send_frame(nested(depth))
        assert unit.settled()
    assert time.process_time() - began < 4
    assert psutil.Process().memory_info().rss - before < 30 * MB
    assert all("\n" not in each and len(each) < 450 for each in unit.troubles)
    assert unit.load(loading(frames))


def test_blocks_with_large_constants_are_refused_after_the_first(
    unit: HostileUnit, frames: list[Frame], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block has rotary frequencies of 17 MB."""
    build, built = HuggingFaceSpec.build_block, list[int]()

    def building(spec: HuggingFaceSpec, index: int) -> nn.Module:
        built.append(index)
        return build(spec, index)

    monkeypatch.setattr(HuggingFaceSpec, "build_block", building)
    fields = {"hidden_size": 2**24, "num_attention_heads": 1, "num_key_value_heads": 1}
    fields |= {"num_hidden_layers": 12, "intermediate_size": 1}
    model = {"kind": "huggingface", "family": "stablelm", "num_blocks": 12, "head": "causal"}
    honest = loading(frames)[0]
    tree = description_of(honest) | {"span": {"first": 0, "blocks": 12}}
    unit.control.send_frame(described(honest, tree | {"model": model | {"config": fields}}))
    assert unit.settled() and "12 blocks need 201,326,592 bytes" in unit.troubles[-1]
    assert built == [0]


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("bert", {"num_hidden_layers": 10**7}),
        ("bert", {"hidden_size": 10**12}),
        ("bert", {"id2label": {"0": "a" * 10}, "num_labels": 10**9}),
        ("marian", {"decoder_layers": 10**7}),
        ("llama", {"head_dim": 10**12}),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 10**4}}),
        ("stablelm", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1e6}}),
        ("stablelm", {"hidden_size": 2**14, "num_attention_heads": 2**13, "qk_layernorm": True}),
        ("t5", {"num_decoder_layers": 10**7}),
        ("t5", {"relative_attention_num_buckets": 10**12}),
    ],
)
def test_invalid_configurations_of_transformers_are_refused_within_4_s(
    family: str, fields: dict[str, Any]
) -> None:
    model = {"kind": "huggingface", "family": family, "num_blocks": 1, "config": fields}
    model["head"] = {"bert": "tokens", "llama": "causal", "stablelm": "causal"}.get(
        family, "decoder"
    )
    began = time.process_time()
    with pytest.raises(WireError):
        from_description(model)
    assert time.process_time() - began < 4


def changed(part: Frame, **others: torch.Tensor) -> Frame:
    """``part`` with tensors replaced; keys are the ends of tensor names."""
    tensors = load(as_bytes(part.tensors[1]))
    for name, tensor in others.items():
        key = next((each for each in tensors if each.endswith(name)), name)
        tensors[key.replace("__", "/")] = tensor
    return replace(part, tensors=(part.tensors[0], as_tensor(save(tensors))))


def test_parts_with_other_tensors_than_the_block_are_refused(
    unit: HostileUnit, frames: list[Frame]
) -> None:
    """A fused optimiser would write beyond the end of too small state tensors."""
    load_, *parts = loading(frames)
    weight = "blocks.0.attention.query.weight"
    hostile = [
        changed(parts[0], **{weight: torch.zeros(16, 16).double()}),
        changed(parts[0], **{weight: torch.zeros(16, 15)}),
        changed(parts[0], **{f"{weight}__exp_avg": torch.zeros(1)}),
        changed(parts[0], **{f"{weight}__exp_avg": torch.zeros(16, 16)}),  # without the step
        changed(parts[0], **{"blocks.0.other": torch.zeros(10)}),
        replace(parts[1], tensors=(packed(PartHeader("blocks.99", 0)), parts[1].tensors[1])),
        replace(parts[1], tensors=(as_tensor(b"{}"), parts[1].tensors[1])),
    ]
    for number, each in enumerate(hostile, 1):
        assert unit.load([load_])
        unit.control.send_frame(each)
        assert unit.settled()
        assert len(unit.troubles) == number
    unit.control.send_frame(changed(parts[0], **{weight: torch.zeros(1024, 1024)}))
    assert not unit.settled()  # its size exceeds the announced size
    assert unit.load([load_, *parts])


def empty_tensors(count: int) -> torch.Tensor:
    """A safetensors header of empty tensors, whose names need far more memory than the header."""
    head = {
        f"blocks.0.{k}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        for k in range(count)
    }
    text = json.dumps(head).encode()
    return as_tensor(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize("count", [10, 20_000])
def test_empty_tensors_are_refused(unit: HostileUnit, frames: list[Frame], count: int) -> None:
    load_, part, *_ = loading(frames)
    assert unit.load([load_])
    header = packed(PartHeader("blocks.0", 1))
    unit.control.send_frame(replace(part, tensors=(header, empty_tensors(count))))
    assert not unit.settled() or len(unit.troubles) == 1


def test_each_neighbour_needs_its_own_secret(unit: HostileUnit, frames: list[Frame]) -> None:
    """The earlier stage has a secret too, but may not connect as the later stage."""
    own = loading(frames)
    session = description_of(own[0])["session"]
    assert unit.load(own)
    before, following = (neighbour_name(side, 0) for side in (BEFORE, BEHIND))
    for name, shown in ((following, secret_for(session, before)), (before, session)):
        with pytest.raises(LinkError, match="UNAUTHENTICATED"):
            RawStream(unit.channel, HOP, ((SESSION, shown), (NEIGHBOUR, name)))
    unit.hop(session, following).close()


def test_a_neighbour_that_the_description_does_not_list_is_refused(
    unit: HostileUnit, frames: list[Frame]
) -> None:
    """The neighbour shows the correct secret for its name."""
    own = loading(frames)
    assert unit.load(own)
    for name in (neighbour_name(BEFORE, 1), neighbour_name(SHARE, 0)):
        with pytest.raises(LinkError, match="no such neighbour"):
            unit.hop(description_of(own[0])["session"], name)


def test_many_neighbours_share_the_limit_of_one(unit: HostileUnit, frames: list[Frame]) -> None:
    """Together they send the rows of one device. The limit of one neighbour is an eighth of 20
    MB."""
    load_, *parts = loading(frames)
    tree = description_of(load_) | {"rows_before": [1] * 20}
    assert unit.load([described(load_, tree), *parts])
    hop = unit.hop(tree["session"], neighbour_name(BEFORE, 19))
    began_s = time.monotonic()
    hop.send(bytes(PIECE_BYTES))  # of an unfinished frame
    with pytest.raises(LinkError, match="ended the stream"):
        hop.receive()
    assert time.monotonic() - began_s < PATIENCE_S / 2  # otherwise the call has timed out


def test_an_incomplete_segment_refuses_steps_and_state_requests(
    unit: HostileUnit, frames: list[Frame]
) -> None:
    assert unit.load(loading(frames)[:-1])
    for number, kind in enumerate((FrameKind.STEP, FrameKind.STATE), 1):
        unit.control.send_frame(replace(step(frames), kind=kind))
        assert unit.settled()
        assert len(unit.troubles) == number


def step(frames: list[Frame]) -> Frame:
    """The first STEP frame of the round."""
    return next(each for each in frames if each.kind == FrameKind.STEP)


def hidden(*shape: int) -> torch.Tensor:
    """An activation of 0."""
    return torch.zeros(shape)


ALL = torch.ones(2, 7) > 0  # the first micro-batch's mask


@pytest.mark.parametrize(
    "tensors",
    [
        (hidden(2, 7, 16),),
        (hidden(2, 7, 16), ALL, ALL),
        (hidden(2, 7, 8), ALL),
        (hidden(2, 7, 16).double(), ALL),
        (hidden(2, 7, 16), ALL.long()),
        (hidden(2, 7, 16), ALL[:1]),
        (hidden(2, 7, 16), torch.ones(2, 8) > 0),
        (hidden(2, 7, 16), ALL[:, :6]),
        (hidden(2, 8, 16), ALL),
        (hidden(0, 10**6, 16), torch.ones(0, 10**6) > 0),
        (hidden(2, 0, 16), torch.ones(2, 0) > 0),
        (hidden(1, 6000, 16), torch.ones(1, 6000) > 0),
    ],
    ids=lambda tensors: " ".join(str(list(each.shape)) for each in tensors),
)
def test_activations_that_do_not_fit_abort_the_step(
    unit: HostileUnit, frames: list[Frame], tensors: tuple[torch.Tensor, ...]
) -> None:
    own = loading(frames)
    begin = next(each for each in frames if each.kind == FrameKind.BEGIN)
    session = description_of(own[0])["session"]
    assert unit.load(own)
    hops = [unit.hop(session, neighbour_name(side, 0)) for side in (BEFORE, BEHIND)]
    unit.control.send_frame(begin)
    hops[0].send_frame(replace(begin, kind=FrameKind.ACTIVATION, tensors=tensors))
    answers = iter(unit.control.receive, None)
    assert next(each for each in answers if each.kind != FrameKind.ALIVE).kind == FrameKind.FAILED
    assert unit.settled()
    assert unit.load(own)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (FrameKind.BEGIN, torch.tensor([[0, 7]])),
        (FrameKind.BEGIN, torch.tensor([[1, -1]])),
        (FrameKind.BEGIN, torch.tensor([[1, 7]] * 4)),  # of three micro-batches
        (FrameKind.BEGIN, torch.tensor([1, 7])),
        (FrameKind.BEGIN, torch.empty(0, 2).long()),
        (FrameKind.BEGIN, torch.tensor([[1, 7], [2**62, 7], [2**62, 7]])),
        (FrameKind.BEGIN, torch.tensor([[1.0, 7.0]])),
        (FrameKind.STEP, numbers(math.nan, 1)),
        (FrameKind.STEP, numbers(*[1.0] * 10**4)),
        (FrameKind.STEP, torch.zeros(2, 1)),
    ],
    ids=lambda each: each.name if isinstance(each, FrameKind) else str(each[:2].tolist()),
)
def test_commands_with_invalid_numbers_are_refused(
    unit: HostileUnit, frames: list[Frame], kind: FrameKind, number: torch.Tensor
) -> None:
    begin = next(each for each in frames if each.kind == FrameKind.BEGIN)
    assert unit.load(loading(frames))
    unit.control.send_frame(replace(begin, kind=kind, tensors=(number,)))
    assert unit.settled()
    assert len(unit.troubles) == 1
