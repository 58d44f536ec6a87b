"""Of the SuperLink other machines reach what admitted units need, and whether a unit may come."""

import json
import logging
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.control_pb2 import UnregisterNodeRequest, UnregisterNodeResponse
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, PushObjectRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from round_report import round_report
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from collapipe import __version__
from collapipe.credentials.keys import fingerprint, make_key
from collapipe.deployment.server_folder import CONTROL as ON_MACHINE
from collapipe.deployment.server_folder import NODES, RUNS, ServerFolder
from collapipe.flower import requests
from server_app import guard, questions, refusals
from server_app.guard import NodesAlone
from server_app.records.run_log import write_metrics

PUSH, PART = "/v1/fleet/push-messages", "/v1/fleet/push-object"
NODE, SERVER = 17, 1  # numbers of Flower's
CONTROL, RUNTIME, FLEET = "/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/get-run"
PATHS = "/", CONTROL, RUNTIME, FLEET, PUSH, PART
KEY, STRANGER = make_key(), make_key()


def dialled_from(host: str, folder: Path, known: bool = True) -> TestClient:
    """The SuperLink as a machine reaches it, once ``KEY`` is ``known``."""
    server = ServerFolder(folder)
    server.flower_home.mkdir(parents=True, exist_ok=True)
    if known:
        (server.flower_home / NODES).write_text(
            json.dumps({fingerprint(KEY.public_key()): f"{NODE}"})
        )

    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"Flower got {len(await request.body())}")

    routes = [Route(path, answer, methods=["POST"]) for path in PATHS]
    return TestClient(NodesAlone(Starlette(routes=routes), server), client=(host, 4000))


def signed(
    claimed: ec.EllipticCurvePrivateKey = KEY, own: ec.EllipticCurvePrivateKey = KEY
) -> dict[str, str]:
    """The head of a request of who claims to have a key, and has his ``own``."""
    now = datetime.now(UTC).isoformat()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(claimed.public_key())).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(own, now.encode())).decode(),
        TIMESTAMP_HEADER: now,
    }


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7", "10.0.0.1"])
def test_others_reach_the_nodes_part_alone(host: str, tmp_path: Path) -> None:
    client = dialled_from(host, tmp_path)
    assert client.post(FLEET, content=b"abc", headers=signed()).text == "Flower got 3"
    for path in (
        CONTROL,
        RUNTIME,
        "/",
        "/metrics",
        f"{RUNS}17",
        f"{ON_MACHINE}list-nodes",
        f"/v1/fleet/..{CONTROL}",
        f"/v1/fleet/%2e%2e{CONTROL}",
    ):
        own = {"X-Forwarded-For": "127.0.0.1", "Host": "localhost", **signed()}
        answer = client.post(path, headers=own)
        assert answer.status_code in (403, 404), path
        assert "Flower" not in answer.text


@pytest.mark.parametrize(
    "head",
    [
        {},
        signed(STRANGER, STRANGER),
        signed(KEY, STRANGER),
        signed() | {TIMESTAMP_HEADER: "2026-01-01T00:00:00+00:00"},
        signed() | {FLEET_HTTP_SIGNATURE_HEADER: "no base 64"},
        signed() | {FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(b"no key").decode()},
    ],
)
@pytest.mark.parametrize("host", ["192.0.2.7", "127.0.0.1"])
def test_of_strangers_nothing_but_the_head_is_read(
    host: str, head: dict[str, str], tmp_path: Path
) -> None:
    client = dialled_from(host, tmp_path)
    answer = client.post(FLEET, content=b"abc", headers=head)
    assert answer.status_code == 401 and "Flower" not in answer.text


def test_who_is_refused_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client, key = dialled_from("192.0.2.7", tmp_path), fingerprint(STRANGER.public_key())
    for _ in range(2):
        client.post(FLEET, headers=signed())
        assert caplog.messages == []
    for _ in range(2):
        client.post(FLEET, headers=signed(STRANGER, STRANGER))
        client.post(FLEET)
        client.post(CONTROL)
        client.get(f"/collapipe/admitted/{key}")
        client.get("/collapipe/admitted/%1b[31m%0a")
    assert len(caplog.messages) == 5
    assert sum(key in line for line in caplog.messages) == 2
    assert all("192.0.2.7" in line and line.isprintable() for line in caplog.messages)


def test_no_more_strangers_are_named_than_a_log_can_take(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "_MOST", 3)
    some = refusals.Refusals(logging.getLogger("any"))
    for number in range(9):
        some.note(f"host {number}", "no key")
    assert len(caplog.messages) == 3 and caplog.messages[2].endswith("not named any more")


def test_a_request_has_a_length_that_flower_would_send(tmp_path: Path) -> None:
    client = dialled_from("192.0.2.7", tmp_path)
    for length in (str(2**40), "-1", "1e3", ""):
        head = signed() | {"Content-Length": length}
        assert client.post(FLEET, content=b"abc", headers=head).status_code == 413
    chunked = client.post(FLEET, content=iter([b"abc"]), headers=signed())
    assert chunked.status_code == 413


def test_units_try_again_while_the_server_starts(tmp_path: Path) -> None:
    client = dialled_from("192.0.2.7", tmp_path, known=False)
    assert client.post(FLEET, headers=signed()).status_code == 503
    assert client.get("/collapipe/admitted/a1").json()["admitted"] is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1"])
def test_who_is_on_the_machine_submits_runs(host: str, tmp_path: Path) -> None:
    assert dialled_from(host, tmp_path).post(CONTROL).text == "Flower got 0"


@pytest.mark.parametrize(
    ("key", "admitted"),
    [
        pytest.param(fingerprint(KEY.public_key()), True, id="admitted"),
        pytest.param(fingerprint(STRANGER.public_key()), False, id="stranger"),
        pytest.param("", False, id="none"),
    ],
)
def test_a_unit_is_told_whether_it_may_come(key: str, admitted: bool, tmp_path: Path) -> None:
    told = dialled_from("192.0.2.7", tmp_path).get(f"/collapipe/admitted/{key}").json()
    assert (told["admitted"], told["collapipe"]) == (admitted, __version__)


def test_the_last_rounds_figures_are_told_on_the_machine(tmp_path: Path) -> None:
    client = dialled_from("127.0.0.1", tmp_path)
    assert client.get("/metrics").text == ""
    report = round_report(3, units=(0, 2), failures={1: "gone"}, bytes_up=5, seconds={"plan": 0.5})
    write_metrics(ServerFolder(tmp_path).metrics, report)
    told = client.get("/metrics").text.splitlines()
    for line in ("collapipe_round 3.0", "collapipe_units 2.0", "collapipe_failures 1.0"):
        assert line in told
    assert 'collapipe_bytes{way="up"} 5.0' in told
    assert 'collapipe_seconds{phase="plan"} 0.5' in told


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    """An admitted node."""
    client = dialled_from("192.0.2.7", tmp_path)
    (tmp_path / "server" / "flower" / "runs").mkdir()
    return client


def pushed(*messages: tuple[int, str]) -> bytes:
    """Messages of these senders, in reply to these."""
    found = [
        Message(metadata=Metadata(src_node_id=sender, reply_to_message_id=asked))
        for sender, asked in messages
    ]
    return PushMessagesRequest(messages_list=found).SerializeToString()


def test_replies_of_its_own_pass(client: TestClient) -> None:
    body = pushed((NODE, "asked"))
    assert client.post(PUSH, content=body, headers=signed()).text == f"Flower got {len(body)}"


@pytest.mark.parametrize(
    "body",
    [
        pushed((NODE + 1, "asked")),
        pushed((NODE, "asked"), (NODE + 1, "asked")),
        pushed((SERVER, "")),
        pushed((NODE, "")),
        b"no message",
    ],
    ids=["another's reply", "beside its own", "a question of the server's", "a question", "none"],
)
def test_no_node_speaks_for_another(client: TestClient, body: bytes) -> None:
    """Flower believes it: a unit could have others train, restore and tell."""
    answer = client.post(PUSH, content=body, headers=signed())
    assert answer.status_code == 403 and "Flower" not in answer.text


def test_a_node_sends_no_more_than_replies_to_the_last_questions_can_have(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_SMALL_BYTES", 1000)
    folder = ServerFolder(tmp_path)

    def took(times: int) -> list[int]:
        body = PushObjectRequest(object_content=b"\0".ljust(397)).SerializeToString()
        assert len(body) == 400
        part = {"content": body, "headers": signed()}
        return [client.post(PART, **part).status_code for _ in range(times)]  # type: ignore[arg-type]

    assert took(3) == [200, 200, 413]  # nobody has asked
    folder.expect_replies("5", 1, 300)  # a reply may be pushed twice
    assert took(5) == [200] * 4 + [413]
    folder.expect_replies("5", 2, 300)
    folder.expect_replies("6", 1, 400)
    assert took(7) == [200] * 6 + [413]
    folder.forget_questions("6")
    assert took(5) == [200] * 4 + [413]
    folder.forget_questions()
    assert folder.expected_replies() == {}


@pytest.mark.parametrize(
    ("part", "status"),
    [
        (b"ArrayChunk  4\0" + b"a,b,", 200),
        (b"ab," * 10 + b"\0" + b"ab,", 200),
        (b"ab," * 400 + b"\0", 403),
        (b"ab," * 400, 403),
        (b"no end", 403),
    ],
    ids=["short", "some children", "long", "long without an end", "without an end"],
)
def test_a_part_has_a_short_head(
    part: bytes, status: int, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower splits the head at commas, into up to 27 times its bytes."""
    monkeypatch.setattr(requests, "_HEAD_BYTES", 1000)
    body = PushObjectRequest(object_content=part).SerializeToString()
    answer = client.post(PART, content=body, headers=signed())
    assert answer.status_code == status
    assert ("Flower" in answer.text) == (status == 200)
    if status == 200:
        assert client.post(PART, content=b"\x0a" + part, headers=signed()).status_code == 403


def test_a_run_that_ends_meanwhile_costs_no_other_runs_unit_its_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its note goes after the notes were listed, and before they are read."""
    folder = ServerFolder(tmp_path)
    (folder.flower_home / "runs").mkdir(parents=True)
    folder.expect_replies("5", 1, 300)
    folder.expect_replies("6", 1, 400)
    read = Path.read_bytes

    def read_late(file: Path) -> bytes:
        folder.forget_questions("5")
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", read_late)
    assert folder.expected_replies() == {"6": (1, 400)}


def test_another_request_than_a_part_is_small(client: TestClient) -> None:
    head = signed() | {"Content-Length": str(2**20 + 1)}
    assert client.post(PUSH, content=b"abc", headers=head).status_code == 413


def test_the_words_of_a_units_rows_are_one_part(client: TestClient) -> None:
    """The SuperLink's process imports no ``questions``, which would import torch for seconds."""
    most = questions.rows(words=True).size.total_bytes
    for size, said in ((most, "any run"), (2 * most, "no Content-Length")):  # no run has asked
        head = signed() | {"Content-Length": str(size)}
        answer = client.post(PART, content=b"abc", headers=head)
        assert answer.status_code == 413 and said in answer.text


def test_the_control_api_answers_in_json_on_the_machine(tmp_path: Path) -> None:
    """What Flower refuses, and what is no question of its, is told with a status."""

    async def unregister(request: Request) -> Response:
        asked = UnregisterNodeRequest.FromString(await request.body())
        if asked.node_id != 2**63 + 7:
            return PlainTextResponse("no such node", 404)
        return Response(UnregisterNodeResponse().SerializeToString())

    flower = Starlette(routes=[Route("/v1/control/unregister-node", unregister, methods=["POST"])])
    client = TestClient(NodesAlone(flower, ServerFolder(tmp_path)), client=("127.0.0.1", 4000))
    for method, question, expected in (
        ("unregister-node", {"node_id": str(2**63 + 7)}, (200, "{}")),
        ("unregister-node", {"node_id": "7"}, (404, "no such node")),
        ("unregister-node", {"node": "7"}, (400, None)),
        ("make-coffee", {}, (400, None)),
    ):
        answer = client.post(f"{ON_MACHINE}{method}", json=question)
        assert (answer.status_code, expected[1] or answer.text) == (expected[0], answer.text)
