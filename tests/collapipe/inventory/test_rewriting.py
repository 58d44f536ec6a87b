"""Measured laws are written into an inventory; the rest of the file does not change."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from collapipe.errors import ConfigError
from collapipe.inventory.file import read_inventory
from collapipe.inventory.rewriting import Laws, with_laws, write_laws
from collapipe.inventory.schema import InventorySection
from collapipe.inventory.yaml_file import from_text
from collapipe.state import AffineLaw, BlockCost

EXAMPLES = sorted((Path(__file__).parents[3] / "docs/examples").glob("*.yaml"))
LAW = AffineLaw(0.0123456, 0.0, 3.2e-5, 0.25)
COST = BlockCost(1e9, 2e9, 1.5e6, 1.5e6, 1.2e8)
LINK = AffineLaw(0.0, 0.0, 1 / 3, 7e-5)
SIZES = "block_flops: 3e+09, hop_bits: 3e+06"
CHUNK = f"chunk: {{u: 0.01235, v: 0, w: 3.2e-05, l: 0.25, {SIZES}}}"
REPLACED = re.compile(r"\b(flops_per_s|d2d_rate_bps|launch_s|hop_latency_s|chunk)\b")
FILE = Path("boxes.yaml")

UNUSUAL = """\
# a person's file
batch_size:    64
model:
    name: transformer   # aligned
clusters:
  -   name: 'workshop'
      devices:
      -   flops_per_s: 4.0e11   # of its data sheet
          # what a launch takes
          launch_s: 0.003
          name: "a"
          memory_bytes: 2_000_000_000
          d2d_rate_bps: 9.40e8   # the switch

      # the second one
      -   {name: b,   flops_per_s: 1.e8, d2d_rate_bps: 9.4e8, memory_bytes: 1E9}
      -   {flops_per_s: 1.0e8, name: c,
           d2d_rate_bps: 9.4e8}
      -   name: d
          address:
            127.0.0.1:1
          chunk:
            w: 0.1 # by hand
            u: 0.2
            l: 0
      links:   # the slow pairs
      -   d2d_rate_bps:   1.0e8   # a guess
          between: [ a,  'b' ]

      -   {between: [c, b], d2d_rate_bps: 1_000, hop_latency_s: 1.0e-3}   # by hand
      - {d2d_rate_bps: 5.0, between:
          [d, a]}
# the end"""
EXPECTED = """\
# a person's file
batch_size:    64
model:
    name: transformer   # aligned
clusters:
  -   name: 'workshop'
      devices:
      -   CHUNK   # of its data sheet
          # what a launch takes
          name: "a"
          memory_bytes: 2_000_000_000
          # the switch

      # the second one
      -   {name: b,   CHUNK, memory_bytes: 1E9}
      -   {CHUNK, name: c}
      -   name: d
          address:
            127.0.0.1:1
          chunk:
            v: 0
            block_flops: 3e+09
            hop_bits: 3e+06
            w: 3.2e-05 # by hand
            u: 0.01235
            l: 0.25
      links:   # the slow pairs
      -   hop_latency_s: 7e-05
          d2d_rate_bps:   9e+06   # a guess
          between: [ a,  'b' ]

      -   {between: [c, b], d2d_rate_bps: 9e+06, hop_latency_s: 7e-05}   # by hand
      - {hop_latency_s: 7e-05, d2d_rate_bps: 9e+06, between:
          [d, a]}
# the end""".replace("CHUNK", CHUNK)


def laws(text: str) -> Laws:
    """A law for each device and each link."""
    section = from_text(FILE, text).parse(InventorySection)
    devices = {(each.name, box.name): LAW for each in section.clusters for box in each.devices}
    return devices | {
        (each.name, *link.between): LINK for each in section.clusters for link in each.links
    }


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_the_unusual_layout_of_a_file_is_kept(newline: str) -> None:
    text, expected = (each.replace("\n", newline) for each in (UNUSUAL, EXPECTED))
    assert with_laws(FILE, text, laws(text), COST) == expected
    assert with_laws(FILE, expected, laws(text), COST) == expected  # measured again


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda each: each.name)
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_other_lines_of_the_examples_do_not_change(file: Path, newline: str) -> None:
    text = file.read_text().replace("\n", newline)
    edited = with_laws(file, text, laws(text), COST)
    kept = [
        [line for line in each.split("\n") if not REPLACED.search(line)] for each in (text, edited)
    ]
    assert kept[0] == kept[1]
    comments = [re.findall("#.*", each) for each in (text, edited)]
    assert comments[0] == comments[1]
    for cluster in from_text(file, edited).parse(InventorySection).clusters:
        for device in cluster.devices:
            assert device.chunk is not None and device.flops_per_s is None
            assert (device.chunk.u, device.chunk.l) == (0.01235, 0.25)


def test_the_law_of_one_device_of_several_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "boxes.yaml"
    file.write_text(UNUSUAL)
    file.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    write_laws(link, {("workshop", "b"): LAW}, COST)
    assert file.read_text() == "\n".join(
        line.replace("flops_per_s: 1.e8, d2d_rate_bps: 9.4e8", CHUNK)
        for line in UNUSUAL.split("\n")
    )
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    assert read_inventory(file, COST).clusters[0].profiles[1].time.u == 0.01235
    assert sorted(tmp_path.iterdir()) == [file, link]


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("w", "ell"), [(1 / 3, 7e-5), (3.21987e-5, 0.0), (1.9e-12, 1 / 7)])
def test_planners_see_the_measured_hop_of_a_link(
    w: float, ell: float, wire_dtype: str, tmp_path: Path
) -> None:
    """For each wire dtype, a link's law holds at both ends and equals the same law of a device."""
    file = tmp_path / "boxes.yaml"
    model = f"model: {{name: dates_transformer}}\npipeline: {{wire_dtype: {wire_dtype}}}"
    file.write_text(UNUSUAL.replace("model:\n    name: transformer   # aligned", model))
    cost = read_inventory(file).model.cost
    hop = AffineLaw(0.5, 0.0, w, ell)
    write_laws(file, {("workshop", "a"): hop, ("workshop", "a", "b"): replace(hop, u=0.0)}, cost)
    a, b, *_ = read_inventory(file, cost).clusters[0].profiles
    for link in (a.links[0], b.links[0]):
        assert (link.w, link.ell) == pytest.approx((w, ell), rel=1e-3)
    assert [a.links[0].to, b.links[0].to] == ["b", "a"]
    assert a.links[1].w == cost.hop_bits / 5.0  # not measured
    planned, *_ = read_inventory(file).clusters[0].profiles
    assert planned.links[0].w == pytest.approx(planned.time.w, rel=1e-3)
    sent = 1.0 if wire_dtype == "float32" else 0.5
    assert planned.links[0].w == pytest.approx(w * sent, rel=1e-3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1.e8, d2d_rate_bps", "1.e8, # c\n            d2d_rate_bps"),
        ("'workshop'", "'shop'"),
        ("[ a,  'b' ]", "[ 'b', a ]"),
        ("-   d2d_rate_bps:   1.0e8", "-   ? d2d_rate_bps\n          : 1.0e8"),
    ],
    ids=["comment-in-braces", "cluster-is-missing", "link-is-missing", "link-of-explicit-keys"],
)
def test_a_file_that_cannot_be_edited_is_left_unchanged(old: str, new: str, tmp_path: Path) -> None:
    wanted, file = laws(UNUSUAL), tmp_path / "boxes.yaml"
    text = UNUSUAL.replace(old, new)
    assert text != UNUSUAL
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"boxes\.yaml: has .*; write the laws"):
        write_laws(file, wanted, COST)
    assert file.read_text() == text
