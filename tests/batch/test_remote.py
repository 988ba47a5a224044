"""Another server over HTTP: what goes out, every way in which a reply ends, and who is not there."""

from __future__ import annotations

import asyncio

import pytest

from kakera.batch.endpoint import Endpoint
from kakera.batch.servers import Broken, RemoteServer, Reply, Unreached
from kakera.errors import UsageError

BODY = b'{"prompt":"x"}'


def exchange(reply: bytes, path: str = "", key: str | None = None) -> tuple[Reply, bytes]:
    """A row's reply from a server that reads the request, sends these bytes and closes; and what it was sent."""

    async def run() -> tuple[Reply, bytes]:
        received = bytearray()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while not received.endswith(BODY):
                received.extend(await reader.read(1000))
            for i in range(0, len(reply), 40):
                writer.write(reply[i : i + 40])
                await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            there = RemoteServer(Endpoint.of(f"127.0.0.1:{port}{path}", key))
            return await there.post("/v1/completions", BODY), bytes(received)

    return asyncio.run(run())


def test_a_row_gives_way_and_brings_its_key():
    _, sent = exchange(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "/base/v1/", "secret")
    head = sent.split(b"\r\n\r\n")[0].decode().lower().split("\r\n")
    assert head[0] == "post /base/v1/completions http/1.1"
    assert {"x-kakera-priority: background", "authorization: bearer secret", "connection: close"} <= set(head)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 429 Busy\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nbusy",
        b"HTTP/1.1 429 Busy\r\nRetry-After: 3\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nbu\r\n2\r\nsy\r\n0\r\n\r\n",
        b"HTTP/1.1 429 Busy\r\nRetry-After: 3\r\n\r\nbusy",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 Busy\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nbusy",
    ],
    ids=["length", "chunks", "close", "continue"],
)
def test_a_reply_is_read_however_it_ends(reply):
    found, _ = exchange(reply)
    assert (found.status, found.headers[b"retry-after"], found.body) == (429, b"3", b"busy")


@pytest.mark.parametrize(
    "reply",
    [b"", b"HTTP/1.1 200 OK\r\nContent-", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b"SSH-2.0-x\r\n\r\n"],
    ids=["nothing", "head", "body", "other"],
)
def test_a_reply_that_breaks_off_is_broken(reply):
    with pytest.raises(Broken):
        exchange(reply)


def test_nobody_there_is_unreached():
    with pytest.raises(Unreached):
        asyncio.run(RemoteServer(Endpoint.of("http://127.0.0.1:1")).post("/v1/completions", BODY))


def test_urls_as_people_write_them():
    written = ("http://h:1", "http://h:1/", "http://h:1/v1", "h:1/v1/chat/completions", "http://h:1/v1/")
    assert {Endpoint.of(url).url for url in written} == {"http://h:1/v1"}
    assert Endpoint.of("https://h/api").url == "https://h:443/api/v1" and Endpoint.of("http://[::1]").host == "::1"
    for wrong in ("", "http://", "ftp://h", "http://h:x"):
        with pytest.raises(UsageError):
            Endpoint.of(wrong)
    with pytest.raises(UsageError):
        Endpoint.of("http://h", "ключ")
