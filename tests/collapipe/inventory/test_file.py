"""An inventory file is read into the laws and limits that it describes."""

import re
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.devices.hardware import transformer_block_cost
from collapipe.errors import ConfigError, is_printable
from collapipe.inventory.file import Inventory, read_inventory
from collapipe.inventory.model import TOKENS
from collapipe.inventory.schema import RoundSection
from collapipe.inventory.yaml_file import MAX_BYTES
from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget, Link
from optim.round.problem import RoundOptions

MODEL = """\
  num_blocks: 12
  forward_flops: 1.0e9
  backward_flops: 2.0e9
  activation_bits: 1.5e6
  gradient_bits: 0.5e6
  block_bytes: 1.2e8
"""


def test_a_measured_device_has_the_law_that_was_measured(tmp_path: Path) -> None:
    (box,) = boxes(tmp_path, "{name: pi, chunk: {u: 0.02, v: 1e-3, w: 3, l: .5}, max_blocks: 6}")
    assert box.time == AffineLaw(0.02, 0.001, 3.0, 0.5)
    assert (box.max_blocks, box.energy) == (6, None)


def test_a_physical_device_has_the_law_of_its_speed_and_rate(tmp_path: Path) -> None:
    (box,) = boxes(tmp_path, "{name: jetson, flops_per_s: 4e11, d2d_rate_bps: 1.0e8}")
    assert box.time == AffineLaw(u=3e9 / 4e11, v=0.0, w=2e6 / 1e8, ell=0.0)
    (box,) = boxes(
        tmp_path,
        "{name: j, flops_per_s: 4e11, d2d_rate_bps: 1e8, launch_s: 0.01, hop_latency_s: 0.02}",
    )
    assert (box.time.v, box.time.ell) == (0.01, 0.02)


PAIR = (
    "{name: a, flops_per_s: 4e11, d2d_rate_bps: 1e9, hop_latency_s: 0.02}",
    "{name: b, chunk: {u: 1, v: 0, w: 0.5, l: 0.1}, energy_j: 9, power_w: 2}",
)


def with_links(*links: str) -> str:
    lines = "".join(f"      - {each}\n" for each in links)
    return file(*PAIR) + f"    links:\n{lines}"


def test_a_link_sets_the_hop_in_both_directions(tmp_path: Path) -> None:
    """A link without a latency has the sender's latency; each hop has an energy law."""
    link = "{between: [b, a], d2d_rate_bps: 1e6}"
    a, b = read(tmp_path, with_links(link)).clusters[0].profiles
    assert a.links == (Link("b", 2.0, 0.02, sync_s=0.0),) and a.time.w == 2e6 / 1e9
    assert b.links == (Link("a", 2.0, 0.1, sync_s=0.0),) and b.time.w == 0.5
    assert b.energy and b.energy.law == AffineLaw(2.0, 0.0, 1.0, 0.2)
    assert b.energy.links == (Link("a", 4.0, 0.2),)
    given = with_links(link.replace("}", ", hop_latency_s: 0}"))
    assert read(tmp_path, given).clusters[0].profiles[0].links == (Link("b", 2.0, 0.0, sync_s=0.0),)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (("{between: [a, c], d2d_rate_bps: 1}",), "links[0].between: c is no device"),
        (("{between: [a, a], d2d_rate_bps: 1}",), "links[0].between: names a twice"),
        (
            ("{between: [a, b], d2d_rate_bps: 1e8}", "{between: [b, a], d2d_rate_bps: 2e8}"),
            "links[1].between: links[0] has the same devices",
        ),
        (("{between: [a, b], d2d_rate_bps: 0}",), "links[0].d2d_rate_bps=0: must be above 0"),
        (("{between: [a, b], d2d_rate_bps: -1e8}",), "must be above 0"),
        (("{between: [a, b], d2d_rate_bps: 1, hop_latency_s: -1}",), "hop_latency_s=-1: "),
        (("{between: [a, b]}",), "links[0].d2d_rate_bps: is missing"),
        (("{between: [a], d2d_rate_bps: 1}",), "links[0].between[1]: is missing"),
        (("{between: [a, b, a], d2d_rate_bps: 1}",), "links[0].between: "),
        (("{between: [a, b], rate: 1}",), "links[0].rate=1: unknown key"),
        (("{between: [a, b], d2d_rate_bps: 1e-9}",), "devices[0]: Link: w="),
    ],
)
def test_bad_links_are_named(tmp_path: Path, links: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, with_links(*links))
    assert message in str(refused.value) and is_printable(str(refused.value))


def test_links_need_the_bits_of_a_hop(tmp_path: Path) -> None:
    text = with_links("{between: [a, b], d2d_rate_bps: 1e8}").replace(PAIR[0], PAIR[1])
    text = text.replace("name: b", "name: a", 1).replace("  activation_bits: 1.5e6\n", "")
    with pytest.raises(ConfigError, match=r"links\[0\]\.d2d_rate_bps.*: activation_bits"):
        read(tmp_path, text)


def test_a_single_device_needs_no_rate(tmp_path: Path) -> None:
    (box,) = boxes(tmp_path, "{name: jetson, flops_per_s: 4e11}")
    assert box.time.w == 0.0
    with pytest.raises(ConfigError, match=r"devices\[0\]\.d2d_rate_bps: "):
        boxes(tmp_path, "{name: a, flops_per_s: 4e11}", "{name: b, chunk: {u: 1}}")


@pytest.mark.parametrize(
    ("memory", "limit", "held"),
    [
        ("1.2e8", "", 1),
        ("3.59e8", "", 2),
        ("1e7", "", 0),
        ("1e9", "max_blocks: 3", 3),
        ("3.59e8", "max_blocks: 3", 2),
    ],
)
def test_memory_holds_whole_blocks(tmp_path: Path, memory: str, limit: str, held: int) -> None:
    (box,) = boxes(tmp_path, f"{{name: a, chunk: {{u: 1}}, memory_bytes: {memory}, {limit}}}")
    assert box.memory_cap(1, 99) == held


def test_energy_is_power_times_time_for_a_batch(tmp_path: Path) -> None:
    (box,) = boxes(
        tmp_path, "{name: a, chunk: {u: 1, v: 2, w: 3, l: 4}, energy_j: 500, power_w: 10}"
    )
    assert box.energy == EnergyBudget(500.0, AffineLaw(10.0, 20.0, 30.0, 40.0), "batch")


def test_energy_without_power_is_noted_and_ignored(tmp_path: Path) -> None:
    inventory = read(tmp_path, file("{name: a, chunk: {u: 1}, energy_j: 500}"))
    assert inventory.clusters[0].profiles[0].energy is None
    (note,) = inventory.notes
    assert "devices[0].energy_j=500" in note
    assert "power_w" in note
    (note,) = read(tmp_path, file("{name: a, chunk: {u: 1}, power_w: 8}")).notes
    assert re.search(r":12: clusters\[0\]\.devices\[0\]\.power_w=8: .*energy_j", note)


def test_reserved_keys_are_allowed(tmp_path: Path) -> None:
    (box,) = boxes(tmp_path, "{name: a, chunk: {u: 1}, address: '10.0.0.7:9000', process_id: 4}")
    assert box.name == "a"


def test_defaults_of_an_inventory(tmp_path: Path) -> None:
    inventory = read(tmp_path, file("{name: a, chunk: {u: 1}}"))
    assert (inventory.section.latency, inventory.section.most_micro_batches) == ("overlap", 64)
    assert (inventory.channels, inventory.clusters[0].uplink) == ((), None)
    assert inventory.section.round == RoundSection()


def test_a_micro_batch_holds_at_least_one_sample(tmp_path: Path) -> None:
    text = file("{name: a, chunk: {u: 1}}")
    assert read(tmp_path, f"{text}max_micro_batches: 500\n").section.most_micro_batches == 64
    assert read(tmp_path, f"{text}max_micro_batches: 5\n").section.most_micro_batches == 5


def test_a_named_model_has_the_cost_of_its_sizes(tmp_path: Path) -> None:
    device = "{name: a, flops_per_s: 1e9, memory_bytes: 1e9}"
    inventory = read(tmp_path, file(device, model="  name: transformer\n"))
    cost = transformer_block_cost(512, 2048, TOKENS, 64)
    assert inventory.model.num_blocks == 6
    assert inventory.model.block_bytes == cost.block_bytes
    profile = inventory.clusters[0].profiles[0]
    assert profile.time.u == (cost.forward_flops + cost.backward_flops) / 1e9
    assert profile.memory_cap(1, 99) == int(1e9 / cost.block_bytes)


def test_the_key_tokens_sets_the_length_of_a_named_models_samples(tmp_path: Path) -> None:
    model = "  name: transformer\n  tokens: 80\n"
    inventory = read(tmp_path, file("{name: a, flops_per_s: 1e9}", model=model))
    assert inventory.model.block_bytes == transformer_block_cost(512, 2048, 80, 64).block_bytes


def test_keys_next_to_a_models_name_override_its_values(tmp_path: Path) -> None:
    model = "  name: transformer\n  num_blocks: 4\n  block_bytes: 7.0e7\n"
    inventory = read(tmp_path, file("{name: a, flops_per_s: 1e9}", model=model))
    assert (inventory.model.num_blocks, inventory.model.block_bytes) == (4, 7e7)


def test_decibels_become_numbers(tmp_path: Path) -> None:
    inventory = read(tmp_path, joint_file())
    (cluster,) = inventory.clusters
    assert cluster.uplink is not None
    assert cluster.uplink.gains == pytest.approx((0.1, 1.0, 100.0))
    uplink = cluster.uplink
    assert (uplink.max_power_w, uplink.energy_j) == (0.5, 10.0)
    assert (uplink.model_bits, uplink.activation_bits) == (4e6, 0.0)
    channel = inventory.channels[0]
    assert (channel.bandwidth_hz, channel.interference_w) == (5e5, 0.07)
    assert channel.noise_w_per_hz == pytest.approx(1e-20, rel=1e-9, abs=0.0)  # -170 dBm


def test_an_empty_round_section_uses_the_planners_defaults() -> None:
    assert RoundSection().model_dump(exclude_none=True) == {"queues": ()}
    assert RoundSection.model_fields.keys() - {"queues"} <= asdict(RoundOptions()).keys()


def test_all_keys_of_the_round_section_are_read(tmp_path: Path) -> None:
    given = (
        "round: {drift: paper, drift_weight: 2, kappa: 3, interference_constant_w: 4, "
        "gradient_bound: 5, gamma_max: 6, queues: [7.5], fading: rayleigh, "
        "uplink: after, energy: adapters, segment_price: paper}\n"
    )
    figures = read(tmp_path, joint_file() + given).section.round
    assert figures.model_dump() == {
        "drift": "paper",
        "drift_weight": 2.0,
        "kappa": 3.0,
        "interference_constant_w": 4.0,
        "gradient_bound": 5.0,
        "gamma_max": 6.0,
        "fading": "rayleigh",
        "uplink": "after",
        "segment_price": "paper",
        "energy": "adapters",
        "queues": (7.5,),
    }


@pytest.mark.parametrize("number", ["64", "6.4e1", "+64.", "0.64e2", "6.4E+1", "64.0"])
def test_a_number_can_be_written_in_every_usual_form(tmp_path: Path, number: str) -> None:
    text = file("{name: a, chunk: {u: 1}}").replace("batch_size: 64", f"batch_size: {number}")
    assert read(tmp_path, text).section.batch_size == 64


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("max_blocks: }", ":12: clusters[0].devices[0].max_blocks"),
        ("memory_bytes: null}", ":12: clusters[0].devices[0].memory_bytes"),
        ("process_id: Null}", ":12: clusters[0].devices[0].process_id"),
        ("energy_j: ~, power_w: 3}", ":12: clusters[0].devices[0].energy_j"),
        ("max_blocks: 3}\nchannels:", ":13: channels"),
    ],
)
def test_a_key_without_a_value_is_refused(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, file(f"{{name: a, chunk: {{u: 1}}, {text}") + "max_micro_batches: 3\n")
    assert re.search(rf"{re.escape(place)}(=\S+)?: is empty", str(refused.value))


@pytest.mark.parametrize(("chunk", "key"), [("u: 1, l: 0", "w"), ("u: 1, v: 1, w: 0", "l")])
def test_a_missing_hop_time_is_refused_instead_of_counted_as_zero(
    tmp_path: Path, chunk: str, key: str
) -> None:
    other = "{name: b, flops_per_s: 4e11, d2d_rate_bps: 1e8}"
    with pytest.raises(ConfigError, match=rf":13: .*devices\[1\]\.chunk\.{key}: "):
        boxes(tmp_path, other, f"{{name: a, chunk: {{{chunk}}}}}")
    _, box = boxes(tmp_path, other, "{name: a, chunk: {u: 1, w: 0, l: 0}}")
    assert box.time == AffineLaw(1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1,\nb: }", "inventory.yaml:2: not YAML"),
        (b"", "is empty; docs/examples has inventories"),
        (b"- 1\n", "inventory.yaml:1: the file: "),
        (b"a: \xff\n", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"a: &a [1, 2]\nb: [*a, *a]\n", "has an alias"),
        (b"a: &a {b: *a}\n", "has an alias"),
        (b"#" * (MAX_BYTES + 1), "more than 1,000,000 bytes"),
        (b"a: 1\n---\nb: 2\n", "another document"),
        (b"? [1]\n: 2\n", "a key that is no text"),
    ],
)
def test_a_file_that_is_not_an_inventory_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_inventory(path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("energy_j: 10,", "", ":13: clusters[0].uplink.energy_j: "),
        (
            "[-10, 0, 20]",
            "[0, 20]",
            ":13: clusters[0].uplink.gain_db: 2 values, expected 3, one for each channel",
        ),
        ("[-10, 0, 20]", "[0, 20, loud]", "gain_db[2]=loud: "),
        ("[-10, 0, 20]", "[0, 20, 180.1]", "gain_db[2]=180.1: must be from -180 dB to 180 dB"),
        ("[-10, 0, 20]", "3", "gain_db=3: "),
        ("interference_w: 0.07", "interference_w: 0", "interference_w=0: must be above 0"),
        ("-170", "170000", "noise_dbm_per_hz=170000: must be from -180 dB to 180 dB"),
        ("    uplink", "    uplinc", "clusters[0].uplinc: unknown key; nearest: uplink"),
        ("noise_dbm_per_hz", "noise", "noise=-170: unknown key; nearest: noise_dbm_per_hz"),
        (
            "channels:",
            "round: {drift: gama}\nchannels:",
            "round.drift=gama: must be one of gamma, paper",
        ),
        (
            "channels:",
            "round: {queues: [1, 2]}\nchannels:",
            "round.queues: 2 values, expected 1, one for each cluster",
        ),
        (
            "channels:",
            "round: {queues: [-1.5]}\nchannels:",
            ":14: round.queues[0]=-1.5: ",
        ),
        ("channels:", "round: {kapa: 1}\nchannels:", "round.kapa=1: unknown key; nearest: kappa"),
    ],
)
def test_bad_radio_values_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = joint_file()
    assert old in text
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text.replace(old, new))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("{name: a, flops_per_s: 1}", ":12: clusters[0].devices[0]: AffineLaw: u=3000000000.0 "),
        ("{name: a, flops_per_s: 1e9, d2d_rate_bps: 1}", "AffineLaw: w=2000000.0 "),
        ("{name: a, chunk: {u: 1, l: 1e9}}", "AffineLaw: ell=1000000000.0 "),
        ("{name: a, chunk: {u: 1e-40}}", "chunk.u=1e-40: too far from 1"),
        ("{name: a, flops_per_s: 1e18, launch_s: 1e7}", "AffineLaw: v=10000000.0 "),
        (
            "{name: a, chunk: {u: 1}, power_w: 1e8, energy_j: 1}",
            "clusters[0].devices[0]: AffineLaw: u=100000000.0 ",
        ),
    ],
)
def test_laws_outside_the_allowed_range_are_refused(
    tmp_path: Path, device: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, file(device))
    assert message in str(refused.value)


PIECES = st.sampled_from(
    ["", "0", "-1", "1e9", ".inf", "null", "[]", "{", "}", "'", "&a", "*a", "\t", "\n", ": ", "- "]
)


@given(data=st.data())
def test_any_text_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    text = joint_file()
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = start + data.draw(st.integers(0, 4))
        text = text[:start] + data.draw(PIECES | st.characters(codec="utf-8")) + text[stop:]
    with tempfile.TemporaryDirectory() as folder:
        try:
            read(Path(folder), text)
        except ConfigError as error:
            assert is_printable(str(error))


def test_uplinks_channels_and_rounds_require_each_other(tmp_path: Path) -> None:
    text = joint_file()
    with pytest.raises(ConfigError, match=r":13: clusters\[0\]\.uplink: "):
        read(tmp_path, text[: text.index("channels:")])
    with pytest.raises(ConfigError, match=r"clusters\[0\]\.uplink: "):
        read(tmp_path, file("{name: a, chunk: {u: 1}}") + text[text.index("channels:") :])
    with pytest.raises(ConfigError, match=r":13: round: "):
        read(tmp_path, file("{name: a, chunk: {u: 1}}") + "round: {kappa: 1}\n")


def file(*devices: str, model: str = MODEL) -> str:
    """An inventory of one cluster."""
    lines = "".join(f"      - {device}\n" for device in devices)
    return f"batch_size: 64\nmodel:\n{model}clusters:\n  - name: shop\n    devices:\n{lines}"


def joint_file() -> str:
    """An inventory of a joint round with three channels."""
    channel = "  - {bandwidth_hz: 5e5, interference_w: 0.07, noise_dbm_per_hz: -170}\n"
    uplink = "    uplink: {power_w: 0.5, energy_j: 10, upload_bits: 4e6, gain_db: [-10, 0, 20]}\n"
    return file("{name: a, chunk: {u: 1}}") + uplink + "channels:\n" + 3 * channel


def read(folder: Path, text: str) -> Inventory:
    path = folder / "inventory.yaml"
    path.write_text(text, encoding="utf-8")
    return read_inventory(path)


def boxes(folder: Path, *devices: str) -> tuple[DeviceProfile, ...]:
    """The devices of the only cluster."""
    return read(folder, file(*devices)).clusters[0].profiles
