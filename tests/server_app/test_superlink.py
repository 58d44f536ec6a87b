"""Of the SuperLink other machines reach what nodes need, and whether a unit may come."""

import json
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from collapipe import __version__
from server_app.superlink import NodesAlone

CONTROL, RUNTIME, FLEET = "/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/get-run"


def dialled_from(host: str, nodes: Path) -> TestClient:
    def answer(_: Request) -> PlainTextResponse:
        return PlainTextResponse("Flower")

    inner = Starlette(routes=[Route(path, answer) for path in ("/", CONTROL, RUNTIME, FLEET)])
    return TestClient(NodesAlone(inner, nodes), client=(host, 4000))


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7", "10.0.0.1"])
def test_others_reach_the_nodes_part_alone(host: str, tmp_path: Path) -> None:
    client = dialled_from(host, tmp_path / "nodes.json")
    assert client.get(FLEET).text == "Flower"
    for path in (CONTROL, RUNTIME, "/", f"/v1/fleet/..{CONTROL}", f"/v1/fleet/%2e%2e{CONTROL}"):
        answer = client.get(path, headers={"X-Forwarded-For": "127.0.0.1", "Host": "localhost"})
        assert answer.status_code in (403, 404), path
        assert "Flower" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1"])
def test_who_is_on_the_machine_submits_runs(host: str, tmp_path: Path) -> None:
    assert dialled_from(host, tmp_path / "nodes.json").get(CONTROL).text == "Flower"


@pytest.mark.parametrize(("serial", "admitted"), [("a1", True), ("b2", False), ("", False)])
def test_a_unit_is_told_whether_it_may_come(serial: str, admitted: bool, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.json"
    nodes.write_text(json.dumps({"a1": "17"}))
    told = dialled_from("192.0.2.7", nodes).get(f"/collapipe/admitted/{serial}").json()
    assert (told["admitted"], told["collapipe"]) == (admitted, __version__)
