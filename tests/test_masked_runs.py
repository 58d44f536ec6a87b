"""A masked run gives, up to rounding, the weights of a run whose server sees every update."""

import json
import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated import run, weights
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from lying import Lying
from resumed import World, differing, outcome, tensors
from run_files import rounds_of, summary_of
from torch import Tensor

from client_app.app import app as client_app
from collapipe.config import load_overrides
from collapipe.errors import ConfigError, RoundFailedError
from collapipe.secure_aggregation.masks import Words
from collapipe.secure_aggregation.messages import Roster, SharesReply, SurvivorsReply, UnmaskReply
from collapipe.secure_aggregation.quantising import LEVELS, Quantiser
from collapipe.secure_aggregation.shamir import SHARE_BYTES
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.messages import Failure

BOUND = 10.0  # larger than every change of weights in these runs
PLAIN = (
    "decoder.mode=control_unit",
    "federation.weighting=uniform",
    "federation.max_update_norm=null",
    f"privacy.clip_norm={BOUND}",
    "federation.rounds=1",
    "model.num_blocks=2",
    "federation.local_steps=1",
)
MASKED = (
    *PLAIN,
    "privacy.secure_aggregation=true",
    "optimizer.state=reset",
    "federation.checkpoint_every=1",
)
Spoil = Callable[[Message, Context], bool]
Secret = tuple[bytes, ...]
WINDOW = 64  # bytes: size of the pieces of an update that are searched for


class Watched:
    """The real ClientApp; it records its replies and raises an error if ``spoilt`` returns true."""

    def __init__(self, spoilt: Spoil = lambda message, context: False) -> None:
        self.replies: list[tuple[str, int, Message]] = []
        self._spoilt = spoilt

    def __call__(self, message: Message, context: Context) -> Message:
        if self._spoilt(message, context):
            raise OSError("the battery is empty")
        reply, kind = client_app(message, context), message.metadata.message_type
        self.replies.append((kind, int(context.node_config["partition-id"]), reply))
        return reply


def lost(kind: str, *units: int, round_: int = 1) -> Spoil:
    """These units fail when they receive their ``round_``-th message of this kind."""
    seen = dict[int, int]()

    def spoilt(message: Message, context: Context) -> bool:
        if message.metadata.message_type != kind:
            return False
        unit = int(context.node_config["partition-id"])
        seen[unit] = seen.get(unit, 0) + 1
        return unit in units and seen[unit] == round_

    return spoilt


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5)


def bound(precision: str) -> float:
    return 2 * BOUND / (LEVELS[precision] + 1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return run(tmp_path_factory.mktemp("plain") / "run", *PLAIN)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watched, list[Secret]]:
    """A masked run's folder, the replies of its units, and each unit's unmasked update.

    The update is in bytes: packed words, unpacked words, and the change of weights as float32.
    """
    folder, client, secret = tmp_path_factory.mktemp("masked") / "run", Watched(), list[Secret]()
    real = Quantiser.quantise

    def quantise(self: Quantiser, change: np.ndarray, *how: Any) -> Words:
        floats = np.array(change, np.float32).tobytes()
        words = real(self, change, *how)
        secret.append((self.pack(words).tobytes(), words.tobytes(), floats))
        return words

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quantiser, "quantise", quantise)
        run(folder, *MASKED, client=client)  # type: ignore[arg-type]
    return folder, client, secret


def test_a_masked_run_equals_the_plain_run_up_to_rounding(
    plain: dict[str, Tensor], watched: tuple[Path, Watched, list[Secret]]
) -> None:
    folder, *_ = watched
    assert 0 < apart(plain, weights(folder)) <= bound("float32")
    (line,) = rounds_of(folder)
    assert line["units"] == [0, 1, 2]
    assert line["skipped"] is None


def content_bytes(content: RecordDict) -> bytes:
    """All values of a message as bytes, numbers as float32."""
    parts = list[bytes]()
    for record in content.values():
        for value in record.values():
            if isinstance(value, Array):
                parts.append(value.data)
            elif isinstance(value, bytes):
                parts.append(value)
            elif isinstance(value, list) and not isinstance(value[0], str):
                parts.append(np.array(value, np.float32).tobytes())
            else:
                parts.append(str(value).encode())
    return b"".join(parts)


def contains_part(content: RecordDict, secret: Secret) -> bool:
    """Whether a message contains a piece of an update that has more than four distinct bytes."""
    text = content_bytes(content)
    starts = ((form, i) for form in secret for i in range(0, len(form) - WINDOW, WINDOW))
    windows = (form[i : i + WINDOW] for form, i in starts)
    return any(each in text for each in windows if len(set(each)) > 4)


def test_no_reply_contains_a_part_of_an_update(
    watched: tuple[Path, Watched, list[Secret]],
) -> None:
    """Each reply has only the expected records, and the counted bytes are those that were sent."""
    folder, client, secret = watched
    total = sum(each.numel() for each in weights(folder).values())
    quantiser = Quantiser(total, BOUND, LEVELS["float32"], 3)
    assert len(secret) == 3
    arrays = dict[tuple[str, str], int]()
    for kind, _, reply in client.replies:
        assert not {*reply.content} & {Failure.__name__}
        assert not any(contains_part(reply.content, each) for each in secret)
        for group, record in reply.content.array_records.items():
            for name in records.unpack_tensors(record):
                arrays[kind, f"{group}/{name}"] = arrays.get((kind, f"{group}/{name}"), 0) + 1
    assert arrays == {("train", "weights/masked"): 3}
    texts = [kind for kind, _, reply in client.replies for _ in reply.content.config_records]
    kinds = {"query.rows", "query.state", "query.keep", "train"}
    masks = {records.MASK_KEYS, records.MASK_SHARES, records.SURVIVORS, records.UNMASK}
    assert {*texts} == kinds | masks
    assert all(texts.count(kind) == 3 for kind in masks)
    sent = sum(
        records.text_bytes(reply.content) for kind, _, reply in client.replies if kind in masks
    )
    assert rounds_of(folder)[0]["bytes_up"] == sent + 3 * quantiser.num_bytes


def test_a_part_of_an_update_is_found_in_any_record(
    watched: tuple[Path, Watched, list[Secret]],
) -> None:
    """This shows that the test above can fail."""
    _, client, secret = watched
    words, _, change = secret[0]
    floats = np.frombuffer(change, np.float32)
    planted: list[ArrayRecord | ConfigRecord | MetricRecord] = [
        ConfigRecord({"bytes": words[1000:1200]}),
        ConfigRecord({"floats": floats[100:200].tolist()}),
        MetricRecord({"floats": floats[300:400].tolist()}),
        ArrayRecord({"array": Array(floats[:100])}),
    ]
    for record in planted:
        content = RecordDict(dict(client.replies[-1][2].content))
        content["more"] = record
        assert contains_part(content, secret[0])


@pytest.mark.parametrize(
    "precision", ["int8", pytest.param("bfloat16", marks=pytest.mark.thorough)]
)
def test_masked_low_precision_adapters_equal_the_plain_run_up_to_rounding(
    tmp_path: Path, precision: str
) -> None:
    plain = run(tmp_path / "plain", *PLAIN, "adapter=lora")
    options = "adapter=lora", f"compression={precision}"
    masked = run(tmp_path / "masked", *MASKED, *options)
    assert 0 < apart(plain, masked) <= bound(precision)


def test_a_unit_that_fails_before_unmasking_does_not_change_the_sum(
    tmp_path: Path, watched: tuple[Path, Watched, list[Secret]]
) -> None:
    client = Watched(lost(records.UNMASK, 2))
    found = run(tmp_path / "run", *MASKED, client=client)  # type: ignore[arg-type]
    expected = weights(watched[0])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (line,) = rounds_of(tmp_path / "run")
    assert line["units"] == [0, 1, 2] and line["failures"] == {}


def test_a_unit_that_fails_before_unmasking_misses_the_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sum contains its update. After two missed rounds the unit is suspended until it replies
    again."""

    def leaving(message: Message, context: Context) -> Message:
        unit, kind = context.node_config["partition-id"], message.metadata.message_type
        if unit == 2 and kind == records.UNMASK:
            return Message(Error(5, "not there"), reply_to=message)
        return client_app(message, context)

    options = *MASKED, "federation.rounds=3", "federation.miss_limit=2"
    run(tmp_path / "run", *options, client=leaving)  # type: ignore[arg-type]
    assert [line["units"] for line in rounds_of(tmp_path / "run")] == [[0, 1, 2]] * 3
    assert "round 3: unit 2 is back" in capsys.readouterr().out


def test_a_unit_that_reveals_wrong_shares_does_not_change_the_sum_and_is_logged(
    tmp_path: Path,
    watched: tuple[Path, Watched, list[Secret]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lying(message: Message, context: Context) -> Message:
        reply, unit = client_app(message, context), context.node_config["partition-id"]
        if message.metadata.message_type == records.UNMASK and unit == 2:
            unpacked = records.unpack(UnmaskReply, reply.content)
            wrong = dict.fromkeys(unpacked.shares, bytes(SHARE_BYTES))
            reply.content = records.pack(replace(unpacked, shares=wrong))
        return reply

    found = run(tmp_path / "run", *MASKED, client=lying)  # type: ignore[arg-type]
    expected = weights(watched[0])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "round 1: unit 2 sent wrong shares" in caplog.text


def test_a_unit_that_finishes_a_masked_round_is_suspended_no_longer_for_earlier_faults(
    tmp_path: Path,
) -> None:
    """A second fault in a row would suspend it for two rounds."""
    rounds = list[int]()

    def lying(message: Message, context: Context) -> Message:
        reply, unit = client_app(message, context), context.node_config["partition-id"]
        if message.metadata.message_type == records.UNMASK and unit == 2:
            rounds.append(1)
            if len(rounds) in (1, 3):
                unpacked = records.unpack(UnmaskReply, reply.content)
                wrong = dict.fromkeys(unpacked.shares, bytes(SHARE_BYTES))
                reply.content = records.pack(replace(unpacked, shares=wrong))
        return reply

    run(tmp_path / "run", *MASKED, "federation.rounds=4", client=lying)  # type: ignore[arg-type]
    assert [line["units"] for line in rounds_of(tmp_path / "run")] == [[0, 1, 2]] * 4


@pytest.fixture(scope="module")
def plain_without_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder, client = tmp_path_factory.mktemp("without") / "run", Watched(lost("train", 1))
    return run(folder, *PLAIN, client=client)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [records.MASK_KEYS, records.MASK_SHARES, records.TRAIN])
def test_a_unit_that_fails_before_or_in_training_is_excluded_and_recorded(
    tmp_path: Path, plain_without_one: dict[str, Tensor], kind: str
) -> None:
    client = Watched(lost(kind, 1))
    found = run(tmp_path / "run", *MASKED, client=client)  # type: ignore[arg-type]
    assert 0 < apart(found, plain_without_one) <= bound("float32")
    (line,) = rounds_of(tmp_path / "run")
    assert line["units"] == [0, 2]
    assert "battery" in line["failures"]["1"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        ((0, 2), "its owner's file does not list unit 0, unit 2 in privacy.peers"),
        ((0,), "its owner's file does not list unit 0 in privacy.peers"),
        ((99,), "sent shares for the wrong units"),
    ],
)
def test_units_that_refuse_keys_exclude_themselves_unless_a_sum_could_consist_of_them(
    tmp_path: Path, plain_without_one: dict[str, Tensor], refused: tuple[int, ...], why: str
) -> None:
    """The other units then share new keys. A refusal of no unit of the round restarts nothing."""
    asked = list[int]()

    def refusing(message: Message, context: Context) -> Message:
        reply, unit = client_app(message, context), int(context.node_config["partition-id"])
        if message.metadata.message_type == records.MASK_SHARES:
            asked.append(unit)
            if unit == 1:
                reply.content = records.pack(SharesReply(1, {}, {}, refused))
        return reply

    found = run(tmp_path / "run", *MASKED, client=refusing)  # type: ignore[arg-type]
    assert 0 < apart(found, plain_without_one) <= bound("float32")
    (line,) = rounds_of(tmp_path / "run")
    assert line["failures"] == {"1": f"WireError: {why}"}
    assert sorted(asked) == ([0, 1, 2] if refused == (99,) else [0, 0, 1, 2, 2])


def test_units_that_refuse_keys_in_the_second_attempt_are_named(tmp_path: Path) -> None:
    """There is no third attempt, so the round is skipped."""
    refused = {(1, 1): (0,), (0, 2): (2,)}  # the unit and its attempt: units that it refuses
    attempts = Counter[int]()

    def refusing(message: Message, context: Context) -> Message:
        reply, unit = client_app(message, context), int(context.node_config["partition-id"])
        if message.metadata.message_type == records.MASK_SHARES:
            attempts[unit] += 1
            if (others := refused.get((unit, attempts[unit]))) is not None:
                reply.content = records.pack(SharesReply(unit, {}, {}, others))
        return reply

    with pytest.raises(RoundFailedError):
        run(tmp_path / "run", *MASKED, client=refusing)  # type: ignore[arg-type]
    (line,) = rounds_of(tmp_path / "run")
    file = "WireError: its owner's file does not list"
    assert line["failures"] == {
        "0": f"{file} unit 2 in privacy.peers",
        "1": f"{file} unit 0 in privacy.peers",
    }
    assert line["units"] == [] and "shared their keys" in str(line["skipped"])


def test_units_that_refuse_a_stranger_in_the_second_attempt_are_not_suspended(
    tmp_path: Path,
) -> None:
    """Unit 4 has the keys made again, and three units then refuse unit 3. Rounds are skipped."""
    refused = {(4, 1): (0,), (0, 2): (3,), (1, 2): (3,), (2, 2): (3,)}
    attempts = Counter[tuple[int, str]]()

    def refusing(message: Message, context: Context) -> Message:
        reply, unit = client_app(message, context), int(context.node_config["partition-id"])
        if message.metadata.message_type == records.MASK_SHARES:
            round_ = records.unpack(Roster, message.content).round
            attempts[unit, round_] += 1
            if (others := refused.get((unit, attempts[unit, round_]))) is not None:
                reply.content = records.pack(SharesReply(unit, {}, {}, others))
        return reply

    options = "federation.num_units=5", "channel.num_channels=5", "privacy.threshold=0.51"
    options += ("federation.rounds=3",)
    with pytest.raises(RoundFailedError):
        run(tmp_path / "run", *MASKED, *options, client=refusing)  # type: ignore[arg-type]
    for line in rounds_of(tmp_path / "run"):
        assert line["excluded"] == {}
        assert {"0", "1", "2"} <= line["failures"].keys()  # type: ignore[attr-defined]


def test_a_round_below_the_threshold_is_skipped_with_a_reason(tmp_path: Path) -> None:
    kinds = [records.MASK_KEYS, records.MASK_SHARES, records.TRAIN]
    kinds += [records.SURVIVORS, records.UNMASK]
    spoilers = [lost(kind, 0, 1) for kind in kinds]  # each kind is first sent a round later
    client = Watched(lambda *arguments: any(spoil(*arguments) for spoil in spoilers))
    found = run(tmp_path / "run", *MASKED, "federation.rounds=6", client=client)  # type: ignore[arg-type]
    reports = rounds_of(tmp_path / "run")
    assert [line["units"] for line in reports] == [[], [], [], [], [], [0, 1, 2]]
    assert all("privacy.threshold" in str(line["skipped"]) for line in reports[:4])
    assert "shares" in str(reports[4]["skipped"])
    assert reports[5]["skipped"] is None
    assert found


def test_unreadable_shares_skip_rounds_until_their_sender_is_suspended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unit 1 sends such shares and fails in training, so its masks stay in the sum. Two rounds are
    skipped; the reason names unit 1, and no other unit fails. The third one is without unit 1."""

    def lying(message: Message, context: Context) -> Message:
        if int(context.node_config["partition-id"]) != 1:
            return client_app(message, context)
        if message.metadata.message_type == records.TRAIN:
            raise OSError("the battery is empty")
        reply = client_app(message, context)
        if message.metadata.message_type == records.MASK_SHARES:
            unpacked = records.unpack(SharesReply, reply.content)
            sealed = {unit: bytes(len(each)) for unit, each in unpacked.sealed.items()}
            reply.content = records.pack(replace(unpacked, sealed=sealed))
        return reply

    run(tmp_path / "run", *MASKED, "federation.rounds=3", client=lying)  # type: ignore[arg-type]
    *spoilt, last = rounds_of(tmp_path / "run")
    assert last["units"] == [0, 2]
    assert "suspended" in last["excluded"]["1"]  # type: ignore[index]
    for line in spoilt:
        assert line["units"] == []
        assert str(line["skipped"]).endswith("wrong shares came from: unit 1")
        assert {*line["failures"]} == {"1"}  # type: ignore[misc]
    expected = "round 1: unit 0 cannot open the shares of unit 1; unit 2 cannot open the shares of"
    assert expected in caplog.text


def test_a_skipped_round_has_the_causes_of_all_units_that_failed(tmp_path: Path) -> None:
    """Unit 1 does not confirm the survivors, and unit 2 confirms them to nobody."""

    def failing(message: Message, context: Context) -> Message:
        unit, kind = context.node_config["partition-id"], message.metadata.message_type
        if kind == records.SURVIVORS and unit == 1:
            raise OSError("the battery is empty")
        reply = client_app(message, context)
        if kind == records.SURVIVORS and unit == 2:
            content = records.unpack(SurvivorsReply, reply.content)
            reply.content = records.pack(replace(content, confirmations={}))
        return reply

    with pytest.raises(RoundFailedError, match=r"all rounds \(1\) were skipped"):
        run(tmp_path / "run", *MASKED, "federation.rounds=1", client=failing)  # type: ignore[arg-type]
    (line,) = rounds_of(tmp_path / "run")
    assert str(line["skipped"]).startswith("1 of 3 units confirmed the survivors")
    causes: dict[str, str] = line["failures"]  # type: ignore[assignment]
    assert causes.keys() == {"1", "2"}
    assert "battery" in causes["1"]
    assert causes["2"].endswith("confirmed the survivors to the wrong units")


def test_an_oversized_reply_excludes_its_unit_from_the_round(tmp_path: Path) -> None:
    def padding(message: Message, context: Context) -> Message:
        reply, unit = client_app(message, context), context.node_config["partition-id"]
        if message.metadata.message_type == records.MASK_KEYS and unit == 1:
            for record in reply.content.config_records.values():
                record["json"] = f"{record['json']}{' ' * records.REPLY_BYTES}"
        return reply

    run(tmp_path / "run", *MASKED, "federation.rounds=1", client=padding)  # type: ignore[arg-type]
    (report,) = rounds_of(tmp_path / "run")
    assert report["units"] == [0, 2]
    assert "bytes of JSON, at most 4,096" in str(report["failures"])


def test_a_corrupt_vector_skips_the_round_and_a_short_one_excludes_its_unit(
    tmp_path: Path,
) -> None:
    def nonsense(sent: Tensors, trained: Tensors) -> Tensors:
        return {name: each ^ 0x5A for name, each in trained.items()}

    def short(sent: Tensors, trained: Tensors) -> Tensors:
        return {name: each[1:] for name, each in trained.items()}

    reports = list[dict[str, object]]()
    for lie, ends in (
        (nonsense, pytest.raises(RoundFailedError, match=r"all rounds \(1\) were skipped")),
        (
            short,
            nullcontext(),
        ),
    ):
        folder = tmp_path / lie.__name__
        with ends:
            run(folder, *MASKED, client=Lying(lie, {1}))  # type: ignore[arg-type]
        reports += rounds_of(folder)
    assert [line["units"] for line in reports] == [[], [0, 2]]
    assert "norm" in str(reports[0]["skipped"])
    assert reports[1]["failures"].keys() == {"1"}  # type: ignore[attr-defined]


def test_a_corrupt_sum_spends_epsilon_only_if_units_add_the_noise(
    tmp_path: Path,
) -> None:
    def nonsense(sent: Tensors, trained: Tensors) -> Tensors:
        return {name: each ^ 0x5A for name, each in trained.items()}

    for by, counts in ("units", True), ("server", False):
        options = *MASKED, "privacy.noise_multiplier=4", f"privacy.noise_by={by}"
        folder = tmp_path / by
        with pytest.raises(RoundFailedError):  # the only round is skipped
            run(folder, *options, client=Lying(nonsense, {1}))  # type: ignore[arg-type]
        (line,) = rounds_of(folder)
        assert line["units"] == [] and "norm" in str(line["skipped"])
        assert (line["epsilon"] > 0) == counts  # type: ignore[operator]


def test_the_privacy_account_counts_a_round_before_its_sum_is_unmasked(
    tmp_path: Path,
) -> None:
    """``account.json`` includes the round when units are asked for shares, so a server that is
    killed after that has counted the round."""
    folder, found = tmp_path / "run", list[int]()

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == records.UNMASK:
            found.append(json.loads((folder / "account.json").read_text())["0"])
        return client_app(message, context)

    options = *MASKED, "federation.rounds=2", *NOISY
    run(folder, *options, client=client)  # type: ignore[arg-type]
    assert found == [1] * 3 + [2] * 3


NOISY = ("privacy.noise_multiplier=0.5", "privacy.noise_by=units", "privacy.noise_seed=1")


def test_the_sum_contains_the_units_noise(
    tmp_path: Path, watched: tuple[Path, Watched, list[Secret]]
) -> None:
    """Each of three units adds the noise of a whole sum: only two units must finish, and each of
    them knows its own noise."""
    folder, _, _ = watched
    noisy, plain = run(tmp_path / "noisy", *MASKED, *NOISY), weights(folder)
    noise = torch.cat([(noisy[name] - plain[name]).flatten() for name in sorted(plain)])
    assert float(noise.std()) == pytest.approx(0.5 * BOUND * math.sqrt(3) / 3, rel=0.05)
    privacy = summary_of(tmp_path / "noisy")["privacy"]
    assert privacy["epsilon"] > 1
    assert privacy["noise"] == "privacy.noise_seed=1"


def test_int8_adapters_carry_the_noise_of_the_server_or_the_units(tmp_path: Path) -> None:
    options = *MASKED, "adapter=lora", "compression=int8"
    quiet = run(tmp_path / "quiet", *options)
    for by, times in (
        ("server", 1.0),
        ("units", math.sqrt(3)),
    ):  # each unit adds all noise
        noise_by = f"privacy.noise_by={by}"
        noisy = run(tmp_path / by, *options, *NOISY, noise_by)
        moved = [name for name in sorted(quiet) if not torch.equal(noisy[name], quiet[name])]
        assert all("lora" in name or name.startswith("head.") for name in moved)
        noise = torch.cat([(noisy[name] - quiet[name]).flatten() for name in moved])
        assert float(noise.std()) == pytest.approx(0.5 * BOUND * times / 3, rel=0.1)


def test_of_15_units_one_may_fail_at_each_stage(tmp_path: Path) -> None:
    kinds = [records.MASK_KEYS, records.MASK_SHARES, records.TRAIN]
    dropped = [
        lost(kind, unit) for unit, kind in enumerate([*kinds, records.SURVIVORS, records.UNMASK])
    ]
    options = "federation.num_units=15", "strategy=all", "batch_size=2"
    client = Watched(lambda *arguments: any(each(*arguments) for each in dropped))
    masked = run(tmp_path / "masked", *MASKED, *options, client=client)  # type: ignore[arg-type]
    assert rounds_of(tmp_path / "masked")[0]["units"] == [*range(3, 15)]
    absent = Watched(lost(records.TRAIN, 0, 1, 2))
    plain = run(tmp_path / "plain", *PLAIN, *options, client=absent)  # type: ignore[arg-type]
    assert 0 < apart(plain, masked) <= bound("float32")


@pytest.mark.parametrize(
    "further",
    [
        pytest.param(  # the server adds the noise
            ("privacy.noise_multiplier=0.01", "privacy.noise_seed=1"), marks=pytest.mark.thorough
        ),
        NOISY,
    ],
)
def test_a_resumed_masked_run_equals_an_uninterrupted_one(
    tmp_path: Path, further: tuple[str, ...]
) -> None:
    masked = [*MASKED[:4], *MASKED[-3:], "compression=int8", "federation.num_units=3"]
    world = World(tmp_path, *masked, *further)
    whole = world.run(tmp_path / "whole")
    again = world.run(tmp_path / "again")
    world.run(again, "000001")
    assert differing(tensors(again), tensors(whole)) == []
    assert outcome(again) == outcome(whole)


@pytest.mark.parametrize(
    "override",
    [
        "privacy.noise_by=units",
        "decoder.mode=per_cluster",
        "framework=pipeline",
        "server_optimizer.average=median",
        "federation.weighting=tokens",
        "federation.max_update_norm=10",
        "federation.channel_noise=1",
        "compression.upload=auto",
        "optimizer.state=keep",
        "federation.num_units=1",
        "privacy.clip_norm=null",
        "privacy.clip_quantile=0.5",
        "privacy.threshold=0.5",
    ],
)
def test_options_incompatible_with_masked_sums_are_refused(override: str) -> None:
    load_overrides(MASKED)
    with pytest.raises(ConfigError) as error:
        load_overrides([*MASKED, override])
    assert override.partition("=")[0].partition(".")[2].partition("=")[0] in str(error.value)
