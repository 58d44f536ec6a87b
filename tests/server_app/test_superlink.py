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
from collapipe.plan import RoundPlan
from collapipe.report import RoundReport
from server_app.records.prometheus import write_metrics
from server_app.superlink import NodesAlone

CONTROL, RUNTIME, FLEET = "/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/get-run"


def dialled_from(host: str, nodes: Path) -> TestClient:
    def answer(_: Request) -> PlainTextResponse:
        return PlainTextResponse("Flower")

    inner = Starlette(routes=[Route(path, answer) for path in ("/", CONTROL, RUNTIME, FLEET)])
    guard = NodesAlone(inner, nodes, nodes.with_name("metrics"))
    return TestClient(guard, client=(host, 4000))


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7", "10.0.0.1"])
def test_others_reach_the_nodes_part_alone(host: str, tmp_path: Path) -> None:
    client = dialled_from(host, tmp_path / "nodes.json")
    assert client.get(FLEET).text == "Flower"
    for path in (
        CONTROL,
        RUNTIME,
        "/",
        "/metrics",
        f"/v1/fleet/..{CONTROL}",
        f"/v1/fleet/%2e%2e{CONTROL}",
    ):
        answer = client.get(path, headers={"X-Forwarded-For": "127.0.0.1", "Host": "localhost"})
        assert answer.status_code in (403, 404), path
        assert "Flower" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1"])
def test_who_is_on_the_machine_submits_runs(host: str, tmp_path: Path) -> None:
    assert dialled_from(host, tmp_path / "nodes.json").get(CONTROL).text == "Flower"


def test_the_last_rounds_figures_are_told_on_the_machine(tmp_path: Path) -> None:
    client = dialled_from("127.0.0.1", tmp_path / "nodes.json")
    assert client.get("/metrics").text == ""
    plan = RoundPlan(3, ())
    report = RoundReport(
        round=3,
        plan=plan,
        units=(0, 2),
        failures={1: "gone"},
        bytes_up=5,
        seconds={"plan": 0.5},
    )
    write_metrics(tmp_path / "metrics", report)
    told = client.get("/metrics").text.splitlines()
    for line in ("collapipe_round 3.0", "collapipe_units 2.0", "collapipe_failures 1.0"):
        assert line in told
    assert 'collapipe_bytes{way="up"} 5.0' in told
    assert 'collapipe_seconds{phase="plan"} 0.5' in told


@pytest.mark.parametrize(("serial", "admitted"), [("a1", True), ("b2", False), ("", False)])
def test_a_unit_is_told_whether_it_may_come(serial: str, admitted: bool, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.json"
    nodes.write_text(json.dumps({"a1": "17"}))
    told = dialled_from("192.0.2.7", nodes).get(f"/collapipe/admitted/{serial}").json()
    assert (told["admitted"], told["collapipe"]) == (admitted, __version__)
