"""Who may ask: Host and Origin as browsers send them, keys, other sites; and who takes too long. Over real HTTP."""

import contextlib
import socket
import time

import httpx
import pytest
from live_server import start

from kakera.errors import UsageError
from kakera.server.http.access import Access
from kakera.server.http.connection import TimedConnection

ELSEWHERE = "http://elsewhere.example"
BODY = {"model": "mini", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def ask(live, **headers: str) -> httpx.Response:
    return live.http.post("/v1/chat/completions", json=BODY, headers=headers)


def port_of(live) -> str:
    return live.url.rpartition(":")[2]


def test_a_name_that_was_made_to_point_here_is_refused_on_every_route(live):
    hosts = [f"rebound.example:{port_of(live)}", "rebound.example", "127.0.0.1.rebound.example", "localhost.x"]
    hosts += ["[::1].rebound.example", "[::1]rebound.example", "[::1].rebound.example:80", "[::1]:80.rebound.example"]
    hosts += ["localhost:80.rebound.example", "localhost:80:rebound.example", "rebound.example[::1]", "[localhost]"]
    for host in hosts:
        for path in ("/", "/health", "/metrics", "/v1/models", "/v1/kakera/status"):
            response = live.http.get(path, headers={"Host": host})
            assert response.status_code == 421 and response.json()["error"]["code"] == "host_not_allowed"
        refused = ask(live, Host=host, Origin=f"http://{host}")
        assert refused.status_code == 421 and "--allowed-host" in refused.json()["error"]["message"]


def test_loopback_has_its_names_with_any_port(live):
    for host in ("localhost", "LOCALHOST:1", "localhost.:30000", "127.0.0.1", "[::1]", "[::1]:30000"):
        assert live.http.get("/health", headers={"Host": host}).status_code == 200, host


def test_a_name_that_was_allowed_is_answered(serve):
    server = serve([{"text": "x"}], allowed_hosts=("AI.example.com", "10.0.0.7"))
    for host in ("ai.example.com", "ai.example.com:8443", "10.0.0.7", "localhost"):
        assert ask(server, Host=host, Origin=f"https://{host}").status_code == 200, host
    assert ask(server, Host="other.example.com").status_code == 421


@pytest.mark.parametrize("path", ["/flush_cache", "/v1/chat/completions", "/v1/messages", "/tokenize", "/v1/invented"])
@pytest.mark.parametrize("origin", [ELSEWHERE, "null", "http://localhost:3000", "http://127.0.0.1"])
def test_a_page_elsewhere_can_not_drive_a_server_without_a_key(live, path, origin):
    before = len(live.engine.requests)
    plain = {"Origin": origin, "Content-Type": "text/plain"}  # what a browser sends without a preflight
    response = live.http.post(path, content='{"prompt": "x"}', headers=plain)
    error = response.json()["error"]
    assert response.status_code == 403 and error["type"] == "permission_error" and "--cors-origin" in error["message"]
    assert len(live.engine.requests) == before


def test_no_answer_may_be_read_by_a_page_elsewhere(live):
    for response in (live.http.get("/v1/models", headers={"Origin": ELSEWHERE}), ask(live, Origin=ELSEWHERE)):
        assert not [name for name in response.headers if name.startswith("access-control-")]
    asked = {"Origin": ELSEWHERE, "Access-Control-Request-Method": "POST"}
    assert live.http.options("/v1/chat/completions", headers=asked).status_code == 405


def test_our_own_page_works_under_each_of_its_names(live):
    for host in (f"127.0.0.1:{port_of(live)}", f"localhost:{port_of(live)}"):
        assert live.http.get("/", headers={"Host": host}).status_code == 200
        assert ask(live, Host=host, Origin=f"http://{host}").status_code == 200


def test_clients_send_no_origin(live):
    import anthropic  # one and a half seconds

    assert live.client.chat.completions.create(**BODY).usage.completion_tokens == 2
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=20) as client:
        assert client.messages.create(**BODY).usage.output_tokens == 2
    assert live.http.post("/flush_cache").status_code == 200


@pytest.fixture(scope="module")
def keyed(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("keyed") / "script.json"
    with start(model, path, [{"text": "x"}], keys=("new", "old"), origins=("http://localhost:3000",)) as server:
        yield server


def test_a_site_that_was_allowed_may_ask_and_read_and_no_other(keyed):
    here = "http://localhost:3000"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = keyed.http.options("/v1/chat/completions", headers={"Origin": here, **asked})
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == here
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for key, status in (("new", 200), ("wrong", 401)):
        response = ask(keyed, Origin=here, Authorization=f"Bearer {key}")
        assert response.status_code == status and response.headers["access-control-allow-origin"] == here
    refused = keyed.http.options("/v1/chat/completions", headers={"Origin": ELSEWHERE, **asked})
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers


def test_a_site_that_was_allowed_needs_no_key_where_there_is_none(serve):
    server = serve([{"text": "x"}], origins=("http://localhost:3000",))
    assert ask(server, Origin="http://localhost:3000").status_code == 200
    assert ask(server, Origin="http://localhost:3001").status_code == 403


def test_each_of_several_keys_is_taken_in_both_headers_and_nothing_near_them(keyed):
    for key in ("new", "old"):
        assert ask(keyed, Authorization=f"Bearer {key}").status_code == 200
        assert ask(keyed, Authorization=f"bearer  {key}").status_code == 200  # a scheme has no case
        assert ask(keyed, **{"x-api-key": key}).status_code == 200
    assert ask(keyed).status_code == ask(keyed, **{"x-api-key": ""}).status_code == 401
    for key in ("ne", "neww", "newold", "new,old", "NEW"):
        assert ask(keyed, Authorization=f"Bearer {key}").status_code == 401
        assert ask(keyed, **{"x-api-key": key}).status_code == 401
    assert keyed.client.with_options(api_key="old").models.list().data


def test_head_is_get_without_a_body(keyed, live):
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/chat/completions", "/nowhere"):
        head, get = live.http.head(path), live.http.get(path)
        assert (head.status_code, head.headers["content-type"]) == (get.status_code, get.headers["content-type"])
        assert head.content == b""
    assert keyed.http.head("/v1/models").status_code == 401
    assert live.http.head("/health", headers={"Host": "rebound.example"}).status_code == 421


def test_with_keys_the_routes_are_described_to_nobody(keyed, live):
    for path in ("/docs", "/openapi.json"):
        assert keyed.http.get(path, headers={"x-api-key": "new"}).status_code == 404
        assert live.http.get(path).status_code == 200


def test_the_description_of_the_routes_loads_nothing_and_runs_nothing(live):
    answer = live.http.get("/docs")
    assert "script" not in answer.text.lower() and "http://" not in answer.text.replace(live.url, "")
    assert "https://" not in answer.text and "default-src 'none'" in answer.headers["content-security-policy"]
    assert live.http.get("/redoc").status_code == 404
    document = live.http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in answer.text
    assert "max_completion_tokens" in answer.text and f"curl {live.url}/v1/responses" in answer.text


def test_host_is_checked_on_loopback_and_elsewhere_if_names_are_given():
    assert "127.0.0.5" in Access.when_bound("127.0.0.5").hosts and Access.when_bound("localhost").hosts
    assert Access.when_bound("::1").hosts
    assert Access.when_bound("0.0.0.0").hosts == Access.when_bound("::").hosts == ()
    assert {"a.example", "localhost", "0.0.0.0"} <= set(
        Access.when_bound("0.0.0.0", allowed_hosts=("a.example",)).hosts
    )


@pytest.mark.parametrize("origin", ["*", "null", "localhost:3000", "http://a.example/", "http://*.example"])
def test_what_no_browser_sends_as_an_origin_is_a_usage_error(origin):
    with pytest.raises(UsageError, match="--cors-origin"):
        Access.when_bound("127.0.0.1", origins=(origin,))


@pytest.mark.parametrize("name", ["", "http://a.example", "a.example/v1"])
def test_what_is_no_host_is_a_usage_error(name):
    with pytest.raises(UsageError, match="--allowed-host"):
        Access.when_bound("127.0.0.1", allowed_hosts=(name,))


class Hasty(TimedConnection):
    seconds = 0.3


@pytest.fixture(scope="module")
def hasty(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("hasty") / "script.json"
    with start(model, path, [{"text": "word"}], body_seconds=0.15, http=Hasty) as server:
        server.engine.prefill_seconds = 0.4  # longer than both limits
        yield server


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
BODY_HEAD = HEAD + b"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"


def trickle(live, beginning: bytes, drop: bytes) -> tuple[bytes, float]:
    """Send a drop every 20 ms until the server closes. What it said, and after how many seconds at least."""
    began = time.monotonic()
    said = b""
    with socket.create_connection(("127.0.0.1", int(port_of(live)))) as line:
        line.sendall(beginning)
        line.settimeout(0.02)
        while True:
            assert time.monotonic() < began + 60, "it is never closed"
            try:
                if not (part := line.recv(4096)):
                    break
                said += part
            except TimeoutError:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    line.sendall(drop)
            except ConnectionResetError:
                break
    return said, time.monotonic() - began


@pytest.mark.parametrize("beginning", [b"", HEAD], ids=["nothing", "half a head"])
def test_a_head_that_does_not_end_loses_its_connection(hasty, beginning):
    said, seconds = trickle(hasty, beginning, b"X-A: b\r\n" if beginning else b"")
    assert said == b"" and seconds > 0.25


def test_a_body_that_trickles_is_told_and_then_cut_off(hasty):
    said, seconds = trickle(hasty, BODY_HEAD + b"{", b" ")
    assert said.startswith(b"HTTP/1.1 408 ") and b"did not end within 0.15 seconds" in said
    assert seconds > 0.25


def test_a_body_that_trickles_on_after_its_refusal_is_cut_off(hasty):
    said, seconds = trickle(hasty, BODY_HEAD.replace(b"localhost", b"rebound.example"), b" ")
    assert said.startswith(b"HTTP/1.1 421 ") and seconds > 0.25


def test_only_incoming_requests_are_timed(hasty):
    for _ in range(2):
        began = time.monotonic()
        assert hasty.post("/v1/completions", model="mini", prompt="a", max_tokens=1).status_code == 200
        assert time.monotonic() - began > Hasty.seconds, "the test must outlast the limit"


def test_headers_have_a_limit_in_number_and_in_bytes(live):
    for headers in ({f"x-{i}": "y" for i in range(100)}, {"x-long": "y" * 17_000}):
        response = live.http.get("/health", headers=headers)
        assert response.status_code in (400, 431), response.text
    assert live.http.get("/health", headers={f"x-{i}": "y" * 100 for i in range(90)}).status_code == 200
    endless, _ = trickle(live, HEAD, b"X-Long: " + b"y" * 4000 + b"\r\n")
    assert endless.startswith(b"HTTP/1.1 400 ")
