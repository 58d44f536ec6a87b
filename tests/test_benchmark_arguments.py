"""Benchmarks refuse arguments that would end in a traceback after they have measured."""

import re
from argparse import ArgumentParser
from pathlib import Path

import pytest

from benchmarks.arguments import at_least, writable

_COUNT = re.compile(r'"--(?:turns|rounds|seeds|clusters|units|devices|steps|batches)", type=int,')


@pytest.mark.parametrize(
    "options", [["--turns", "1"], ["--turns", "two"], ["--output", "file/folder"]], ids=" ".join
)
def test_a_bad_argument_ends_a_benchmark_at_once(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    parser = ArgumentParser()
    parser.add_argument("--turns", type=at_least(2))
    parser.add_argument("--output", type=writable)
    assert parser.parse_args(["--turns", "2", "--output", "new/x.json"]).turns == 2
    assert Path("new").is_dir()
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(options)
    assert ended.value.code == 2


def test_counts_of_benchmarks_have_a_bound() -> None:
    folder = Path(__file__).parents[1] / "benchmarks"
    found = [
        (file.name, line)
        for file in folder.rglob("*.py")
        for line in file.read_text().splitlines()
        if _COUNT.search(line) and "default=[0, 1, 2]" not in line  # seeds themselves
    ]
    assert found == []
