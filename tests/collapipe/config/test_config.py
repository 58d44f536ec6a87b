"""Options compose to the same tree as in Hydra, and saved configurations are read safely.

A saved configuration may come from another person, so its references are not followed.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
from federated import TINY
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

import collapipe
from collapipe.config import composing, load_overrides, load_saved, load_text, outline
from collapipe.config.composing import composed, options_of, run_dir, sweep_dir
from collapipe.config.overrides import expand, literal, split
from collapipe.config.settings import CONF
from collapipe.errors import ConfigError
from collapipe.sections import DataSettings, FrameworkSettings

# Options that set values, besides choices of groups.
VALUES = [
    [*TINY, "hydra.run.dir=runs/1", "optimizer.lr=3", "optimizer={lr: 1, beta1: 0.5}"],
    [f"tracking.mlflow={literal('${oc.env:HOME} a=b, [c]')}", "data.root='${oc.env:HOME}/texts'"],
    [
        *("batch_size=${federation.num_units}", "data.name='null'", "data.config=null"),
        *("data.root=", "seed=1", "seed=2", "optimizer.lr=1", "optimizer.eps=1e-3"),
        *("runtime.name='true'", "link={port: ${seed}}"),
    ],
    [
        *("channel.gain_db=[-100,-90.0]", "cluster=edge", "cluster.kinds=[{name: a, power_w: 1}]"),
        *("environment=mobile", "environment.mobility={speed_m_per_s: 1}"),
        *("decoder={mode: shared}", "optimizer={lr: 1}", "optimizer=sgd", "optimizer.momentum=0.5"),
        *("framework.cut=2", "framework=splitfed", "pipeline.num_segments=2", "pipeline=gpipe"),
    ],
    ["experiment=multi30k", "batch_size=8", "strategy=random", "strategy.num_scheduled=1"],
    ["task=ner", "model=huggingface", "model.family=bert", "model.name=null"],
    ["hydra.run.dir='a/${seed}/it\\'s'", "hydra.sweep.dir=b", "seed=7"],
]
# Overrides that only Hydra applies: adding, deleting, and references to Hydra's own records.
RECORDED = [
    ["seed=3", "hydra.run.dir=runs/${hydra.job.override_dirname}", "task=dates"],
    ["seed=3", "tracking.mlflow=${hydra.job.config_name}"],
    ["task=ner", "model=huggingface", "+model.config.hidden_size=16", "model.family=bert"],
    ["+own=3", "++seed=3", "+model.own={a: [1, null]}", "seed=4"],
    ["~data.text_column", "~strategy", "seed=2"],
]


@pytest.mark.parametrize("overrides", [*VALUES, *RECORDED], ids=" ".join)
def test_the_tree_equals_the_one_that_hydra_composes(overrides: list[str]) -> None:
    """Options and folders are equal, also if they refer to Hydra's own records."""
    ours, hydras = composed(overrides), by_hydra(overrides)
    assert options_and_folders(ours) == options_and_folders(hydras)
    assert without_time(run_dir(ours)) == without_time(hydras.hydra.run.dir)


def test_a_value_is_set_without_composing_by_hydra_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = composed(["strategy=random"])
    kept = options_and_folders(before)
    monkeypatch.delattr(composing, "composed_by_hydra")
    after = composed([*VALUES[0], "strategy=random", "task.max_length=9", "decoder={mode: shared}"])
    assert (after.task.max_length, run_dir(after)) == (9, "runs/1")
    assert (
        options_and_folders(composed(["strategy=random"])) == kept
    )  # the cached tree has not changed


@pytest.mark.parametrize(
    "bad",
    [
        "sead=1",
        "data.root.x=1",
        "model.config.depth=1",
        "seed=0,1",
        "seed=range(3)",
        "task=dates,ner",
        "task=date",
        "task=null",
        "data=[1]",
        "~sead",
        "~seed=1",
        "+seed=3",
        "+task_model=dates_transformer",
        "+experiment=multi30k",
        "adapter={ranks: 3}",
        "decoder={depth: 1}",
        "seed@link=1",
        "hydra.run.dir=null",
        "hydra.run=3",
    ],
)
def test_overrides_that_hydra_refuses_are_one_line_errors(bad: str) -> None:
    overrides = ["batch_size=8", "strategy=random", bad]
    with pytest.raises((HydraException, TypeError, ValueError)):
        by_hydra(overrides)
    with pytest.raises(ConfigError, match=bad.lstrip("~+").partition("=")[0]) as caught:
        composed(overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["link=null"], r"^link=null: must be a section; set its options, link\.OPTION=…$"),
        (["decoder=3"], r"^decoder=3: must be a section"),
        (["~batch_size"], r"^batch_size=null: must be a whole number"),
        (["~tracking"], r"^tracking=null: must be a section"),
        (["~environment"], r"^environment: has no _target_; choose one of the files in conf/"),
        (["hydra.run.dir=${nowhere}"], r"^hydra\.run\.dir: Interpolation key 'nowhere' not found"),
        (["hydra.searchpath=[pkg://os]"], r"^unknown option hydra\.searchpath"),
        (["hydra.run.dir="], r"^hydra\.run\.dir=: must name a folder"),
        (["hydra.run.dir=null"], r"^hydra\.run\.dir=null: must name a folder"),
        (["~hydra.run.dir"], r"^~hydra\.run\.dir: must name a folder"),
        (["hydra.verbose=true"], r"^unknown option hydra\.verbose"),
        (
            ["cluster.file=mine.yaml"],
            r"^unknown option cluster\.file: add cluster=devices or cluster=file to set it$",
        ),
    ],
)
def test_invalid_trees_are_one_line_errors(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_overrides(overrides)
    assert "\n" not in str(caught.value)


@given(st.text(st.sampled_from("\\'\"${}a ü,[]=:~#.\t"), max_size=9))
@example("null")
@example("${oc.env:HOME}")
def test_a_quoted_value_is_parsed_to_the_same_value(value: str) -> None:
    overrides = [f"tracking.mlflow={literal(value)}", f"hydra.run.dir={literal(value + 'a')}"]
    assert split(shlex.join(overrides)) == overrides
    tree = composed(overrides)
    assert options_of(tree)["tracking"]["mlflow"] + "a" == run_dir(tree) == value + "a"


def test_a_text_in_place_of_the_list_of_overrides_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        collapipe.train("federation.rounds=3")
    shown = "'federation.rounds=3'"
    assert str(raised.value) == f"overrides={shown}: must be a list of texts: [{shown}]"


@pytest.mark.parametrize("given", [iter(["seed=3"]), {"seed": 3}, [3], [Path("seed=3")], None])
def test_overrides_other_than_a_list_of_texts_are_refused(given: Any) -> None:
    """An iterator would have no options left when they are composed."""
    with pytest.raises(ConfigError, match=r"must be a list of texts: \['KEY=VALUE'\]$"):
        collapipe.train(given)


def test_the_folders_of_runs_in_one_process_have_the_times_of_their_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Later":
            return cls(2099, 1, 1)

    assert not run_dir(composed([])).startswith("outputs/2099-01-01")
    monkeypatch.setattr("hydra.core.utils.datetime", Later)
    assert run_dir(composed([])) == "outputs/2099-01-01/00-00-00"


def test_a_sweep_has_every_combination_and_hydras_sweep_folder() -> None:
    overrides = ["seed=0,1", "task=dates,ner", "link.port=range(3)", "hydra.sweep.dir='it\\'s'"]
    jobs = expand(overrides)
    assert len({tuple(job) for job in jobs}) == len(jobs) == 2 * 2 * 3
    assert jobs[1] == ["seed=0", "task=dates", "link.port=1", overrides[3]]
    assert sweep_dir(overrides) == "it's"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'seed: "\\x24{oc.env:SECRET}"', "has references"),
        (b'seed: "\\u0024{oc.env:SECRET}"', "has references"),
        (b'"a": |\n  ${oc.env:SECRET}', "has references"),
        (b"a: " + b"[" * 3000, "not a saved configuration"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_no_reference_in_a_saved_configuration_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_saved(file)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_reference_in_a_comment_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("# ${oc.env:SECRET}\ntask: {}\n")
    with pytest.raises(ConfigError, match=r"task\._target_ is missing"):
        load_saved(file)


def test_units_do_not_import_the_strategy() -> None:
    """The strategy's class may exist only on the server's machine."""
    overrides = ["strategy._target_=turnz.Turns"]
    assert load_text(outline(overrides).text).tree["strategy"]["_target_"] == "turnz.Turns"
    with pytest.raises(ConfigError, match=r"^strategy\._target_=turnz\.Turns: "):
        load_overrides(overrides)


@pytest.mark.parametrize("option", ["task", "channel.gain_db", "+own", "seed"])
@pytest.mark.parametrize("depth", [60, 200, 3000])
def test_deeply_nested_brackets_are_an_error(option: str, depth: int) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_overrides([f"{option}={'[' * depth}{']' * depth}"])


PLAIN = FrameworkSettings("collapipe", None, unsplit=False, aggregate=True, cut=None, train=True)
DIFFERENCES: dict[str, dict[str, Any]] = {
    "collapipe": {},
    "collapipe_no_ss": {"partition": "no_segment_scheduling"},
    "vanilla_fl": {"partition": "vanilla_fl", "unsplit": True},
    "vanilla_fl_devices": {"partition": "vanilla_fl", "unsplit": True},
    "pipeline": {"partition": "pipeline", "aggregate": False},
    "titanic": {"partition": "titanic"},
    "splitfed": {"cut": 1},
}


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "framework").glob("*.yaml")))
def test_each_framework_sets_its_differences_and_training_can_be_disabled(name: str) -> None:
    settings = load_overrides([f"framework={name}"])
    expected = replace(PLAIN, name=name, **DIFFERENCES[name])
    assert settings.framework == expected
    again = load_overrides([f"framework={name}", "framework.train=false"])
    assert again.framework == replace(expected, train=False)


@pytest.mark.parametrize(
    "options",
    [
        ["framework=pipeline", "server_optimizer=fedadam", "federation.max_update_norm=null"],
        ["framework=vanilla_fl", "pipeline.num_segments=2", "compression=int8"],
        ["decoder.mode=control_unit", "compression=int8"],
        ["compression=auto", "strategy.error_budget=0.1"],
        ["data.tokenizer=federated", "data.tokenizer_min_rows=2"],
    ],
)
def test_groups_and_sweeps_may_set_options_that_a_framework_does_not_use(
    options: list[str],
) -> None:
    load_overrides(options)


def test_the_default_is_one_channel_per_unit_and_the_paper_has_four() -> None:
    five = load_overrides(["federation.num_units=5"])
    assert five.build("channel").num_channels == 5
    assert load_overrides([]).build("channel").num_channels == 3
    assert load_overrides(["channel=paper"]).build("channel").num_channels == 4  # Table II


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("sead", "; nearest: seed"),
        ("data.roots", "; nearest: data.root"),
        ("lr", "; nearest: optimizer.lr"),
        ("federation.steps", "; nearest: federation.local_steps"),
        ("federation.clients", "; known: federation.channel_noise, .*, federation.weighting"),
        ("optimizer.learning_rate", "; known: optimizer.beta1, .*, optimizer.weight_decay"),
        ("nosuch.option", "; known: adapter, batch_size, .*, tracking"),
        ("epochs", "; known: adapter, batch_size, .*, tracking"),
    ],
)
def test_a_similar_option_is_suggested_only_if_there_is_one(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"^unknown option {name}{near}$"):
        load_overrides([f"{name}=1"])


def test_options_are_refused_before_torch_is_imported() -> None:
    code = """
import sys
from collapipe.config import load_overrides
from collapipe.errors import ConfigError
for bad in sys.argv[1:]:
    try:
        load_overrides([bad])
    except ConfigError as error:
        assert bad.partition("=")[0] in str(error), error
    else:
        raise SystemExit(f"{bad} is not refused")
found = {"torch", "datasets", "transformers", "flwr"} & sys.modules.keys()
assert not found, found
"""
    bad = ["nosuch=1", "task=nosuch", "seed=x", "federation.rounds=0", "cluster.num_devices=0"]
    bad += ["environment.fading=x", "strategy.solver=x", "data.root=/nosuch"]
    ended = subprocess.run([sys.executable, "-c", code, *bad], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_python_defaults_of_data_settings_equal_conf() -> None:
    assert load_overrides([]).data == DataSettings()


@pytest.mark.parametrize(
    ("task", "family", "fits"),
    [
        ("dates", "bert", "task=ner"),
        ("dates", "gpt2", "task=causal_lm"),
        ("ner", "gpt2", "task=causal_lm"),
        ("classification", "t5", "task=dates or task=multi30k"),
        ("causal_lm", "bert", "task=ner"),
    ],
)
def test_the_error_names_the_task_that_fits_the_model(task: str, family: str, fits: str) -> None:
    model = ["model=huggingface", f"model.family={family}", "model.num_blocks=1"]
    with pytest.raises(ConfigError, match=rf"set {fits}\b"):
        load_overrides([f"task={task}", *model])
    load_overrides([fits.split()[0], *model])


def test_splitfed_has_one_segment_before_a_cut_that_can_be_moved() -> None:
    """The file sets ``pipeline.num_segments`` for every choice of ``pipeline``."""
    first = load_overrides(["framework=splitfed", "pipeline=gpipe"])
    assert (first.pipeline.num_segments, first.pipeline.schedule) == (1, "gpipe")
    assert first.model.num_blocks == 1
    moved = load_overrides(["framework=splitfed", "framework.cut=3", "pipeline.num_segments=2"])
    assert (moved.pipeline.num_segments, moved.model.num_blocks) == (2, 3)
    assert load_overrides([]).pipeline.num_segments is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["framework.cut=6"], r"framework\.cut=6: must be below model\.num_blocks=6"),
        (["framework.cut=0"], r"framework\.cut=0: must be at least 1"),
        (["pipeline.num_segments=2"], r"num_segments=2: more than framework\.cut=1; a segment"),
        (["decoder.mode=control_unit"], r"framework\.cut=1: .* set decoder\.mode=per_cluster"),
        (["framework.unsplit=true"], r"framework\.cut=1: .* has no cut"),
    ],
)
def test_an_impossible_cut_is_a_one_line_error(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_overrides(["framework=splitfed", *options])
    assert "\n" not in str(caught.value)


def by_hydra(overrides: Sequence[str]) -> DictConfig:
    """The tree as Hydra alone composes it."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides), return_hydra_config=True)


def options_and_folders(tree: DictConfig) -> str:
    """Every unresolved option and the folders; values with their types."""
    options = {key: tree._get_node(key) for key in tree if key != "hydra"}
    folders = [tree.hydra.run._get_node("dir"), tree.hydra.sweep._get_node("dir")]
    return OmegaConf.to_yaml(OmegaConf.create(options)) + repr(folders)


def without_time(folder: str) -> str:
    return re.sub(r"\d\d-\d\d-\d\d", "", folder)


def test_devices_in_one_process_cannot_be_profiled() -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.profile=true\b"):
        load_overrides(["pipeline.profile=true"])


@pytest.mark.parametrize(
    ("recompute", "framework", "all_do"),
    [
        ("true", "collapipe", True),
        ("auto", "collapipe", False),
        ("false", "collapipe", False),
        ("true", "vanilla_fl", False),
    ],
)
def test_all_devices_recompute_only_if_told_and_in_a_pipeline(
    recompute: str, framework: str, all_do: bool
) -> None:
    options = [f"pipeline.recompute={recompute}", f"framework={framework}"]
    assert load_overrides(options).recomputes is all_do
