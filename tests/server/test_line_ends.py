"""What the model says never ends a line of an event stream, whatever a reader takes for the end of a line; and
connections outlive the pools of clients."""

import json

import pytest
from test_enforced import BODIES, MESSAGES

from kakera.server.http.connection import CONNECTIONS, KEEP_ALIVE_SECONDS
from kakera.server.http.sse import event

ENDS = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj"
POOLS = {"httpx": 5, "undici": 4, "aiohttp": 15, "nginx": 60, "AWS's balancers": 60, "Go": 90, "Node's agents": 120}


def test_events_are_one_line_of_data_to_every_reader():
    lines = event({"text": ENDS}, "name").splitlines()
    assert len(lines) == 3 and lines[0] == "event: name" and lines[2] == ""
    assert json.loads(lines[1].removeprefix("data: ")) == {"text": ENDS}
    assert "é" in event({"text": "é\u2028"}), "other letters stay as they are"


@pytest.mark.parametrize("route", BODIES)
def test_streams_carry_line_separators_escaped_in_every_dialect(serve, route):
    server = serve([{"text": ENDS}])
    body = {**BODIES[route], "stream": True}
    if route == MESSAGES:
        body["thinking"] = {"type": "disabled"}
    text = server.post(route, **body).content.decode()
    lines = [line for line in text.splitlines() if line and not line.startswith(("event: ", "data: "))]
    assert lines == [] and all(end not in text for end in "\u2028\u2029\u0085")
    said = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "\\u2028" in json.dumps(said) and "\\u2029" in json.dumps(said) and "\\u0085" in json.dumps(said)


def test_connections_wait_longer_than_clients_keep_them():
    assert max(POOLS.values()) < KEEP_ALIVE_SECONDS == CONNECTIONS["timeout_keep_alive"]
