"""A run names the options that were given and have no effect; they change nothing in it."""

from pathlib import Path
from typing import Any

import pytest
from federated import TINY, play, settings_of
from run_files import rounds_of

from collapipe.config.idle import unused_options
from collapipe.deployment.server_folder import ServerSection

FRAMEWORK = "framework=vanilla_fl"
UNUSED = {  # a choice → options without effect
    f"{FRAMEWORK} strategy=random": ["compression.activation=auto"],
    FRAMEWORK: [
        *("pipeline.num_segments=1", "pipeline.num_micro_batches=3", "pipeline.schedule=gpipe"),
        *("pipeline.recompute=true", "decoder.mode=shared", "compression.activation=int8"),
        *("compression.gradient=int4", "link.reconnect_s=3", "channel.activation_bits=1e6"),
        *("channel.head_s=1", "channel.downlink_rate_bps=1e6"),
    ],
    "framework=titanic strategy=all": ["strategy.partition=pipeline"],
    "framework=pipeline": ["server_optimizer=fedadam", "server_optimizer.eps=0.1"],
    "framework.train=false": [
        *("federation.eval_every=1", "federation.weighting=uniform", "federation.max_share=1"),
        *("federation.max_update_norm=null", "federation.channel_noise=1", "server_optimizer=sgd"),
        "link.reconnect_s=3",
    ],
    "decoder.mode=control_unit": [
        *("link.frame_timeout_s=9", "channel.head_s=1", "channel.downlink_rate_bps=1e6"),
        *("compression.activation=auto", "channel.activation_bits=1e6"),
    ],
    "cluster=edge": [
        *("pipeline.relay=true", "pipeline.keep_shares=false", "pipeline.replicate_every=3"),
        *("environment.speed_correlation=0.5", "environment.return_probability=0.5"),
        *("environment.mobility.round_s=9", "environment.mobility.radius_m=99"),
    ],
}


SERVER = ["runtime=deployment", "runtime.federation=x"]
SERVER += ServerSection(host="here", units=["a", "b"]).options()


def changing(folder: Path) -> list[dict[str, Any]]:
    """Return a run's figures without measured times and schedules, which may have no effect."""
    lines = rounds_of(folder)
    for line in lines:
        line["seconds"] = line["wall_s"] = line["plan"]["certificate"] = None
        for cluster in line["plan"]["clusters"]:
            cluster["schedule"] = None
    return lines


@pytest.mark.parametrize("choice", UNUSED)
def test_unused_options_are_named_and_change_nothing(choice: str, tmp_path: Path) -> None:
    common = [*choice.split(), "federation.rounds=1"]
    given = [each.partition("=")[0] for each in UNUSED[choice]]
    warnings = list(unused_options(settings_of(tmp_path, [*common, *UNUSED[choice]])))
    named = [name for line in warnings for name in line.partition(":")[0].split(", ")]
    assert {*given} <= {*named}
    assert not {*named} - {*given, *(each.partition("=")[0] for each in TINY)}
    play(tmp_path / "without", *common)
    play(tmp_path / "with", *common, *UNUSED[choice])
    assert changing(tmp_path / "with") == changing(tmp_path / "without")


def test_an_added_option_that_no_run_has_is_named(tmp_path: Path) -> None:
    (warning,) = unused_options(settings_of(tmp_path, ["+rounds=3"]))
    assert warning == "rounds: no effect, because no run has this option"


def test_feedback_of_activations_that_are_not_rounded_is_named(tmp_path: Path) -> None:
    feedback = "compression.feedback=true"
    (warning,) = unused_options(settings_of(tmp_path, [feedback]))
    assert warning == "compression.feedback: no effect with compression.activation=float32"
    assert not list(unused_options(settings_of(tmp_path, [feedback, "compression=int8"])))


def test_options_that_are_used_or_defaults_are_not_named(tmp_path: Path) -> None:
    options = [*SERVER, "environment=mobile", "decoder.mode=control_unit", "pipeline.relay=true"]
    assert not list(unused_options(settings_of(tmp_path, options)))


def test_options_of_a_users_class_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from server_app.world.environment import Environment\n\n\n"
    (tmp_path / "own_world.py").write_text(f"{source}class World(Environment):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    options = "environment._target_=own_world.World", "environment.speed_correlation=0.5"
    assert not list(unused_options(settings_of(tmp_path, options)))


def test_a_run_warns_of_unused_options(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    twice = "pipeline.num_segments=3", "pipeline.num_segments=2"
    play(tmp_path, FRAMEWORK, "framework.train=false", *twice)
    (warning,) = [each for each in caplog.messages if "pipeline.num_segments" in each]
    assert warning == (
        "pipeline.num_micro_batches, pipeline.num_segments: no effect with framework=vanilla_fl"
    )
