"""What is fetched for whoever writes a prompt, and above all what is not. No packet leaves this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from drawn import png

from kakera.arch.preprocessor import Pixels
from kakera.errors import RequestRefused, UsageError
from kakera.vision import fetch
from kakera.vision.decode import MOST_BYTES
from kakera.vision.fetch import Fetcher, is_global
from kakera.vision.reader import ImageReader

NAMED, PUBLIC = Fetcher.allowing("Pictures.example., other.example"), Fetcher.allowing("public")
URL = "http://pictures.example/a.png"
FAR = "93.184.215.14"
IMAGE = png(64, 96)


def answer(body: bytes = IMAGE, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Far:
    """Stands for all of the internet: names resolve to `addresses`, connections go to a server of ours."""

    def __init__(self) -> None:
        self.addresses: list[str] = [FAR]
        self.connected: list[str] = []
        self.asked: list[bytes] = []
        self.resolved = 0
        self.says: Callable[[socket.socket], None] = lambda client: client.sendall(answer())
        self._server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with client:
                self.asked.append(client.recv(65536))
                with contextlib.suppress(OSError):
                    self.says(client)

    def resolve(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        self.resolved += 1
        if not self.addresses:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, port)) for address in self.addresses]

    def connect(self, address: tuple[str, int], timeout: float) -> socket.socket:
        self.connected.append(address[0])
        found = socket.socket()
        found.settimeout(timeout)
        found.connect(self._server.getsockname())
        return found

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    found = Far()
    monkeypatch.setattr(fetch.socket, "getaddrinfo", found.resolve)
    monkeypatch.setattr(fetch.socket, "create_connection", found.connect)
    yield found
    found.close()


def test_an_image_comes_from_the_address_that_was_looked_at(far, monkeypatch):
    """No proxy is asked, nothing of ours is told; the name is resolved once."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    assert NAMED.get("http://Pictures.example/a.png?x=1#part") == IMAGE
    assert far.connected == [FAR] and far.resolved == 1
    head = far.asked[0].decode().split("\r\n")
    assert head[0] == "GET /a.png?x=1 HTTP/1.1" and "Host: pictures.example" in head
    assert not [line for line in head if line.lower().startswith(("cookie", "authorization", "referer"))]
    eyes = ImageReader(Pixels(32, 4096, 262_144), 256, fetcher=NAMED)
    assert eyes.look(URL).digest == eyes.picture(IMAGE).digest and eyes.measure(URL).tokens == 6


NO_HOSTS = (
    *("", " ", "a.example,", "https://a.example", "a.example:8443", "*", "*.example", "a b", "me@a.example", "a/b"),
    *("a..example", ".example", "[::1]"),
)


@pytest.mark.parametrize("said", NO_HOSTS)
def test_hosts_that_no_url_can_have_are_wrong_usage(said):
    """Nothing would ever come from there, and nobody would know why."""
    with pytest.raises(UsageError, match=r"--image-urls .*write such as"):
        Fetcher.allowing(said)
    with pytest.raises(UsageError):
        Fetcher.allowing(f"public,{said}")


def test_hosts_as_urls_have_them():
    hosts = ("a.example", "xn--bcher-kva.example", "b\u00fccher.example", "1.1.1.1", "2606:4700::1111", "one_two")
    assert Fetcher.allowing(", ".join(hosts)) == Fetcher(frozenset(hosts))


@pytest.mark.parametrize(
    ("fetcher", "url", "said"),
    [
        (NAMED, "https://evil.example/a.png", "--image-urls does not name it"),
        (NAMED, "https://pictures.example.evil.example/a.png", "does not name it"),
        (NAMED, "https://pictures.example@evil.example/a.png", "does not name it"),
        (NAMED, "https://evil.example\\@pictures.example/a.png", "not fetched|can not be read|password"),
        (NAMED, "http://user:word@pictures.example/a.png", "with a password"),
        (NAMED, "http://pictures.example:22/a.png", "port 80 alone"),
        (NAMED, "https://pictures.example:8443/a.png", "port 443 alone"),
        (NAMED, "http://pictures.example:many/a.png", "can not be read"),
        (NAMED, "http://pictures.example/a b.png", "can not be read"),
        (NAMED, "http://pictures.example/\r\nHost: evil.example", "can not be read|could not be fetched"),
        (PUBLIC, "http://public.example/a.png", "over https"),
        (PUBLIC, "https:///a.png", "https URLs, or sent"),
        (PUBLIC, "https://[::1/a.png", "can not be read"),
    ],
)
def test_what_is_not_allowed_asks_nobody(far, fetcher, url, said):
    with pytest.raises(RequestRefused, match=said):
        fetcher.get(url)
    assert far.asked == []


PRIVATE = [
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1"),
    *("::ffff:10.0.0.1", "::ffff:127.0.0.1", "2002:7f00:1::", "2002:a00:1::", "64:ff9b::a00:1", "ff02::1"),
    *("2001:0:4136:e378:8000:63bf:f5ff:fffe", "2001:db8::1"),
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_of_this_network_are_never_asked(far, address):
    """Public bug 23. Whatever name leads there, alone or beside a public address."""
    assert not is_global(address)
    for addresses in ([address], [FAR, address], [address, FAR]):
        far.addresses = addresses
        for fetcher, scheme in ((NAMED, "http"), (PUBLIC, "https")):
            with pytest.raises(RequestRefused, match="public addresses alone"):
                fetcher.get(f"{scheme}://pictures.example/")
    assert far.connected == []


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost", "[::1]"])
def test_spellings_of_this_machine(host):
    """By the resolver of this machine itself."""
    with pytest.raises(RequestRefused, match=r"public addresses alone|has no address"):
        PUBLIC.get(f"https://{host}/")


def test_public_addresses_are_public():
    for address in (FAR, "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::"):
        assert is_global(address), address


def test_a_name_that_changes_its_answer_is_asked_at_its_first_address(far):
    """Rebinding: between the check and the connection nobody resolves it again."""
    original = far.resolve

    def rebinding(host: str, port: int, **more: Any):
        found = original(host, port, **more)
        far.addresses = ["127.0.0.1"]
        return found

    fetch.socket.getaddrinfo = rebinding  # the fixture puts it back
    assert NAMED.get(URL) == IMAGE and far.connected == [FAR]
    with pytest.raises(RequestRefused, match="public addresses alone"):
        NAMED.get(URL)


@pytest.mark.parametrize(
    ("says", "said"),
    [
        (lambda c: c.sendall(answer(b"secret", "302 Found", "Location: http://127.0.0.1/")), "302 .redirects are not"),
        (lambda c: c.sendall(answer(b"secret", "404 Not Found")), "the answer was 404$"),
        (lambda c: c.sendall(answer(b"secret", "200 OK", "Content-Encoding: gzip")), "came compressed"),
        (lambda c: c.sendall(b"secret" * 10), "could not be fetched"),
        (lambda c: None, "could not be fetched"),
        (lambda c: c.sendall(answer(bytes(MOST_BYTES + 5))), "more than 20,000,000 bytes"),
        (lambda c: c.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(MOST_BYTES + 5)), "more than 20,000,000 bytes"),
    ],
    ids=["redirect", "404", "gzip", "nonsense", "nothing", "large", "large without a length"],
)
def test_answers_that_are_no_image_say_their_kind_and_nothing_of_what_was_read(far, says, said):
    far.says = says
    with pytest.raises(RequestRefused, match=said) as refused:
        NAMED.get(URL)
    assert refused.value.status == 400 and "secret" not in str(refused.value)


def test_a_slow_drip_ends(far, monkeypatch):
    """Of headers, too, each byte of which comes in time."""
    monkeypatch.setattr(fetch, "ALL_SECONDS", 0.3)
    stop = threading.Event()

    def drip(client: socket.socket) -> None:
        while not stop.wait(0.02):
            client.sendall(b"H")

    far.says = drip
    with pytest.raises(RequestRefused, match="takes more than"):
        NAMED.get(URL)
    stop.set()


def test_a_name_without_an_address(far):
    far.addresses = []
    with pytest.raises(RequestRefused, match=r"pictures\.example has no address"):
        NAMED.get(URL)
