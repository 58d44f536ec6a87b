"""The files of ``deploy init`` are read correctly, also with unusual folder and host names."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from collapipe.config.overrides import parse, typed
from collapipe.credentials.addresses import host_and_port
from collapipe.deployment.server_folder import ServerFolder, create
from collapipe.errors import ConfigError
from collapipe.owner_file import read_owner

_SPECIAL = 'my fed, "ä" $HOME %n \\ \U0001f414'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ServerFolder:
    return create(tmp_path_factory.mktemp("odd") / _SPECIAL, ["no", "paris"], "::1", 9000, 9001)


def _after(folder: ServerFolder, name: str, beginning: str) -> str:
    lines = (folder.root / name).read_text(encoding="utf-8").replace("\\\n#", "").splitlines()
    (found,) = [line.partition(beginning)[2] for line in lines if beginning in line]
    return found


def test_option_files_have_the_right_host_units_and_paths(folder: ServerFolder) -> None:
    settings = folder.settings()
    assert (settings.host, settings.units) == ("::1", ["no", "paris"])
    owner = read_owner(folder.root / "units" / "no" / "unit.yaml")
    assert (owner.name, owner.server) == ("no", "[::1]:9000")
    flower = tomllib.loads((folder.flower_home / "config.toml").read_text(encoding="utf-8"))
    assert flower["superlink"]["collapipe"]["root-certificates"] == str(folder.trusted)


def test_flowers_connection_follows_a_moved_folder_and_a_changed_port(tmp_path: Path) -> None:
    create(tmp_path / "old", ["paris"], "::1", 9000, 9001).root.rename(tmp_path / "new")
    moved = ServerFolder(tmp_path / "new")
    options = moved.root / "server.yaml"
    options.write_text(options.read_text().replace("port: 9000", "port: 9002"))
    moved.update_connection()
    (moved.flower_home / "config.toml").unlink()
    moved.update_connection()
    flower = tomllib.loads((moved.flower_home / "config.toml").read_text(encoding="utf-8"))
    assert flower["superlink"] == {
        "default": "collapipe",
        "collapipe": {"address": "127.0.0.1:9002", "root-certificates": str(moved.trusted)},
    }


def test_the_compose_file_has_the_path_of_the_folder(folder: ServerFolder) -> None:
    tree = yaml.safe_load((folder.root / "compose.yaml").read_text(encoding="utf-8"))
    server = tree["services"]["server"]
    (volume,) = server["volumes"]
    read = [server["command"][-1], volume["target"]]  # Compose reads $$ as $
    assert [each.replace("$$", "$") for each in read] == [str(folder.root)] * 2


def test_the_systemd_service_has_the_path_of_the_folder(folder: ServerFolder) -> None:
    started, written = (
        shlex.split(_after(folder, "collapipe-server.service", key).replace("%%", "%"))[-1]
        for key in ("ExecStart=", "ReadWritePaths=")
    )
    assert [started.replace("$$", "$"), written] == [str(folder.root)] * 2


@pytest.mark.parametrize("file", ["README.md", "collapipe-server.service", "compose.yaml"])
def test_written_commands_can_be_pasted_into_a_shell(folder: ServerFolder, file: str) -> None:
    options = shlex.split(_after(folder, file, "runtime=deployment "))
    first, *_ = parse([each for each in options if "runtime.federation" in each])
    assert first.value() == str(folder.root)


def test_simple_paths_are_written_without_quotes() -> None:
    assert typed("runtime.federation", "/srv/fed-1") == "runtime.federation=/srv/fed-1"
    assert parse([typed("seed", "007")])[0].value() == "007"


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("bücher.example", "in ASCII: xn--bcher-kva.example:9000"),
        ("straße.example", "must be HOST:PORT"),
        ("a" * 64, "must be HOST:PORT"),
        ("$(id)", "must be HOST:PORT"),
    ],
)
def test_a_host_that_certificates_cannot_contain_is_refused(
    host: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        create(tmp_path / "f", ["a"], host, 9000, 9001)
    assert not (tmp_path / "f").exists()


def test_an_ipv6_address_may_be_in_brackets(tmp_path: Path) -> None:
    made = create(tmp_path / "f", ["a"], "[::1]", 9000, 9001)
    assert made.settings().host == "::1"
    assert host_and_port("edge_1.example:9000") == ("edge_1.example", 9000)


@pytest.mark.parametrize("name", ["a\nb", "a\udcfcb"])
def test_a_path_with_control_characters_or_not_in_utf8_is_refused(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="control characters, or is not UTF-8"):
        create(tmp_path / name, ["a"], "edge.example", 9000, 9001)
