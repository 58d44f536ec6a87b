"""A run that ended early says how it goes on, or why it cannot."""

from pathlib import Path

from server_app.records.summary import how_to_go_on


def test_the_last_checkpoint_is_named_with_what_to_type(tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "latest").symlink_to("000010")
    told = f"goes on after round 10 with: collapipe resume '{run_dir}'"
    assert how_to_go_on(run_dir, 5) == told


def test_without_a_checkpoint_the_option_is_named(tmp_path: Path) -> None:
    every_five = "federation.checkpoint_every=5; the first follows round 5"
    assert how_to_go_on(tmp_path, 5) == f"cannot go on: no checkpoint ({every_five})"
    assert how_to_go_on(tmp_path, 0).endswith("no checkpoint (federation.checkpoint_every=0)")
