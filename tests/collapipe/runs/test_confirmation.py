"""A run folder from another person must not reach other machines without a question."""

import shlex
from pathlib import Path

import pytest

from collapipe.config import load_overrides
from collapipe.errors import ConfigError
from collapipe.runs.confirmation import check_confirmed, resume_command


@pytest.mark.parametrize(
    ("began", "option", "instead"),
    [
        ([], "tracking.mlflow=http://192.0.2.1", "tracking.mlflow=null"),
        ([], "link.host=192.0.2.1", "link.host=127.0.0.1"),
        ([], "link.advertise=192.0.2.1", "link.advertise=null"),
        (["runtime=deployment"], "runtime.federation=theirs", ""),
    ],
)
def test_addresses_in_a_resumed_run_must_be_given_again(
    began: list[str], option: str, instead: str
) -> None:
    settings = load_overrides([*began, option])
    with pytest.raises(ConfigError, match=rf"^{option}: .*{instead}$"):
        check_confirmed(settings, ["federation.rounds"])
    check_confirmed(settings, [option.partition("=")[0]])
    assert option in shlex.split(resume_command(settings))


@pytest.mark.parametrize(
    ("address", "asks"), [("127.0.0.1:7700", False), ("192.0.2.1:7700", True), ("pi:7700", True)]
)
def test_devices_on_other_machines_must_be_given_again(
    address: str, asks: bool, tmp_path: Path
) -> None:
    """They would see the activations of the user's rows."""
    file = tmp_path / "boxes.yaml"
    boxes = ", ".join(
        f"{{name: {name}, chunk: {{u: 1, w: 0, l: 0}}, address: '{there}'}}"
        for name, there in (("a", "127.0.0.1:1"), ("b", address))
    )
    model = "{num_blocks: 2, block_bytes: 1, forward_flops: 1, backward_flops: 1}"
    file.write_text(f"batch_size: 8\nmodel: {model}\nclusters: [{{name: c, devices: [{boxes}]}}]\n")
    option = f"cluster.file={file}"
    settings = load_overrides(["federation.num_units=1", "cluster=devices", option])
    check_confirmed(settings, ["cluster.file"])
    if asks:
        with pytest.raises(ConfigError, match=rf"^{option}: .* repeat it as an option$"):
            check_confirmed(settings, [])
    else:
        check_confirmed(settings, [])
    assert (option in shlex.split(resume_command(settings))) == asks
    file.unlink()
    assert option not in resume_command(settings)


def test_a_run_on_this_machine_is_resumed_without_more_options() -> None:
    settings = load_overrides([])
    check_confirmed(settings, [])
    assert resume_command(settings) == shlex.join(["collapipe", "resume", settings.run_dir])


def test_a_federations_folder_has_the_options_of_links(tmp_path: Path) -> None:
    federation = f"runtime.federation={tmp_path}"
    settings = load_overrides(["runtime=deployment", federation, "link.host=192.0.2.1"])
    command = shlex.split(resume_command(settings))
    assert federation in command and "link.host=192.0.2.1" not in command
