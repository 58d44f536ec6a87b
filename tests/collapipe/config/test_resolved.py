"""Options are sent as JSON; a text from another machine may be invalid."""

import json
import subprocess
import sys

import pytest

from collapipe.config import load_overrides, load_text, received
from collapipe.config.resolved import parsed
from collapipe.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not the options of a run"),
        ("[1]", "not the options of a run"),
        ('{"tree": 3}', "not the options of a run"),
        ('{"run_dir": "a"}', "not the options of a run"),
        ('{"tree": {"a": ' + "[" * 50 + "]" * 50 + "}}", "is nested too deeply"),
        ('{"tree": ' + '{"a":' * 40_000, "not the options of a run"),
        ('{"tree": {"a": 1' + "0" * 30 + "1}}", r"^settings: a: is a number out of range"),
        ('{"tree": {"a": ' + "9" * 5000 + "}}", "not the options of a run"),
        ('{"tree": {"a": {"b": [1, NaN]}}}', r"^settings: a\.b\[1\]=nan: must be a number"),
        ('{"tree": {"' + "a" * 9999 + '\\n": NaN}}', r"^settings: a{100}=nan: must be a number"),
        ('{"tree": {"a": "' + "b" * 2**18 + '"}}', "expected at most 262,144"),
    ],
)
def test_invalid_texts_are_one_line_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parsed(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_loading_the_same_text_again_returns_the_same_settings() -> None:
    settings = load_overrides(["seed=3"])
    assert load_text(settings.text) is settings


def test_a_reference_in_a_sent_text_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    options = json.loads(load_overrides([]).text)
    options["tree"]["tracking"]["mlflow"] = "${oc.env:SECRET}"
    assert load_text(json.dumps(options)).tracking.mlflow == "${oc.env:SECRET}"


def changed(option: str, value: object) -> str:
    """The default options with ``option`` set to ``value``, or removed if that is ``...``."""
    options = json.loads(load_overrides([]).text)
    *sections, name = option.split(".")
    node = options["tree"]
    for each in sections:
        node = node[each]
    node[name] = value
    if value is ...:
        del node[name]
    return json.dumps(options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("privacy.noise_multiplier", "nan"),
        ("privacy.delta", "nan"),
        ("privacy", ...),
        ("strategy", ...),
        ("strategy", [1]),
        ("strategy._target_", ...),
        ("environment", "fading"),
        ("data.partitioner", ...),
        ("data", []),
        ("task", ...),
        ("task._target_", 3),
        ("cluster", {}),
        ("cluster.num_devices", "\ud800"),
        ("model", None),
        ("seed", ...),
    ],
)
def test_an_invalid_tree_is_accepted_or_a_one_line_error(option: str, value: object) -> None:
    try:
        load_text(changed(option, value))
    except ConfigError as error:
        assert "\n" not in str(error)


def test_nan_is_refused_in_privacy_options() -> None:
    for option in ("noise_multiplier", "delta", "threshold", "clip_quantile"):
        with pytest.raises(ConfigError, match=rf"privacy\.{option}=nan"):
            load_text(changed(f"privacy.{option}", "nan"))


def test_settings_and_overrides_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="both are set"):
        received({"settings": load_overrides([]).text, "overrides": "seed=1"})


def test_apps_import_no_hydra() -> None:
    """One process imports both apps."""
    code = """
import sys
import client_app.app, server_app.app
from collapipe import config
config.load_text(sys.argv[1])
found = {"hydra", "omegaconf"} & sys.modules.keys()
assert not found, found
"""
    text = load_overrides([]).text
    ended = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
