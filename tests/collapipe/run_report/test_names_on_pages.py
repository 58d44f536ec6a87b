"""A page shows each unit's name, or its number if it has no name."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import made_lines, write_lines
from report_page import Page

from collapipe.errors import few_of, unit_called

TOWNS = ("berlin", "paris", "rome", "oslo", "bern", "wien", "riga", "turin")
DEVICE = {
    "name": "pi",
    "blocks": 2,
    **dict.fromkeys(("chunk_s", "compute_s", "wait_s", "send_s", "span_s"), 0.5),
    "sent_bytes": 9,
    "peak_bytes": 9,
}


@pytest.mark.parametrize("named", [True, False])
def test_a_page_shows_each_units_name_or_else_its_number(
    run: Path, report: Callable[..., Page], named: bool
) -> None:
    lines = [*made_lines(20)]
    unit = lines[-1]["plan"]["clusters"][0]["unit"]
    lines[-1] |= {"devices": {unit: [DEVICE]}, "pipeline_s": {unit: 1.5}}
    lines[-1]["events"] = {unit: ["lost pi"]}
    write_lines(run, lines)
    held = json.loads((run / "shards.json").read_text())
    names = TOWNS if named else [f"unit {each}" for each in range(len(TOWNS))]
    for shard in held["shards"] if named else ():
        shard["name"] = TOWNS[shard["unit"]]
    (run / "shards.json").write_text(json.dumps(held))
    page = report(run)
    assert bool(re.search(r"\bunit \d", page.text)) != named
    shown = page.text + " ".join(str(each) for _, each in page.elements)
    for name in names:
        assert name in shown
    here = names[unit]
    for text in ("{}, pi", "{}, measured", "{}, planned", "Round 20, {}: lost pi"):
        assert text.format(here) in shown
    outside = re.sub(r'<div class="charts">.*?</div>', "", page.source, flags=re.DOTALL)
    assert "<figure>" not in outside  # a small chart outside would fill the page's width
    (failed,) = [row for row in page.cells if row[:1] == ["3"] and "failed" in row]
    assert failed[1] in names


def test_three_units_are_named_and_the_others_are_counted() -> None:
    towns = [unit_called(unit, name) for unit, name in enumerate(TOWNS[:4])]
    assert few_of(towns, ", ") == "berlin, paris, rome and 1 more"
    assert few_of(["a", "b", "a"]) == "a; b"
    assert (unit_called(3), unit_called(3, "\x1b[2Jrome")) == ("unit 3", "[2Jrome")
