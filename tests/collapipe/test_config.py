"""Frameworks are files that go together; a saved configuration may be somebody else's: it is read,
and nothing else happens.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from collapipe.config import CONF, load_overrides, load_saved
from collapipe.errors import ConfigError
from collapipe.settings import FrameworkSettings


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'seed: "\\x24{oc.env:SECRET}"', "has references"),
        (b'seed: "\\u0024{oc.env:SECRET}"', "has references"),
        (b'"a": |\n  ${oc.env:SECRET}', "has references"),
        (b"a: " + b"[" * 3000, "not a saved configuration"),
        (b"\xff\xfe", "not a saved configuration"),
    ],
)
def test_no_reference_is_followed_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, says: str
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load_saved(file)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_comment_is_no_reference(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("# ${oc.env:SECRET}\ntask: {}\n")
    with pytest.raises(ConfigError, match=r"task\._target_=None"):
        load_saved(file)


DIFFERENCES = {
    "collapipe": {},
    "collapipe_no_ss": {"partition": "no_segment_scheduling"},
    "vanilla_fl": {"partition": "vanilla_fl", "unsplit": True},
    "pipeline": {"partition": "pipeline", "aggregate": False},
    "titanic": {"partition": "titanic"},
    "splitfed": {"cut": 1},
}


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "framework").glob("*.yaml")))
def test_a_framework_says_how_it_differs_and_the_rest_can_be_set(name: str) -> None:
    settings = load_overrides([f"framework={name}"])
    expected = replace(FrameworkSettings(name), **DIFFERENCES[name])  # type: ignore[arg-type]
    assert settings.framework == expected
    again = load_overrides([f"framework={name}", "framework.train=false"])
    assert again.framework == replace(expected, train=False)


def test_splitfed_is_one_segment_in_front_of_a_cut_that_can_be_moved() -> None:
    """Its file sets an option of another group, whatever is chosen there."""
    first = load_overrides(["framework=splitfed", "pipeline=gpipe"])
    assert (first.pipeline.num_segments, first.pipeline.schedule) == (1, "gpipe")
    assert first.model.num_blocks == 1
    moved = load_overrides(["framework=splitfed", "framework.cut=3", "pipeline.num_segments=2"])
    assert (moved.pipeline.num_segments, moved.model.num_blocks) == (2, 3)
    assert load_overrides([]).pipeline.num_segments is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["framework.cut=6"], r"framework\.cut=6: leaves none of model\.num_blocks=6 blocks"),
        (["framework.cut=0"], r"framework\.cut=0: must be at least 1"),
        (["pipeline.num_segments=2"], r"num_segments=2: more than framework\.cut=1; a segment"),
        (["decoder.mode=control_unit"], r"framework\.cut=1: .* set decoder\.mode=per_cluster"),
        (["framework.unsplit=true"], r"framework\.cut=1: .* has no cut"),
    ],
)
def test_a_cut_that_cannot_be_is_one_line(options: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_overrides(["framework=splitfed", *options])
    assert "\n" not in str(caught.value)
