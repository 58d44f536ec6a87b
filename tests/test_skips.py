"""With ``COLLAPIPE_REQUIRE_DATA=1``, which continuous integration sets, a skipped test fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ONE_FILE = """
import pytest

@pytest.mark.skip
def test_marked(): ...

def test_within(): pytest.skip("no data")

@pytest.mark.xfail
def test_known_to_fail(): assert False

def test_good(): ...
"""
WHOLE_FILE = "import pytest\npytest.skip('no data', allow_module_level=True)"


@pytest.mark.thorough
def test_a_skipped_test_fails_if_data_are_required(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_one.py").write_text(ONE_FILE)
    (tmp_path / "test_two.py").write_text(WHOLE_FILE)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "COLLAPIPE_REQUIRE_DATA": "1"},
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed, 1 xfailed, 2 errors in" in ended.stdout
    assert ended.returncode != 0
