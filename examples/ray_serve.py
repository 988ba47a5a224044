"""kakera under Ray Serve: it starts servers, starts them again when they fail, scales them and drains them.

    pip install 'ray[serve]' httpx  # kakera may be in another environment
    cd examples; serve run --working-dir . ray_serve:build command="kakera serve MODEL" gpus=1 servers=2

All of kakera's routes answer on Serve's port (8000). A client that sends `x-session-id` stays on one server, where its
prefix is cached; others are spread. docs/scale-out.md has what was measured.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import AsyncIterator

import httpx
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

START_SECONDS = 1800  # loading a large model
DRAIN_SECONDS = 600  # for running answers when a server is taken away
OF_THE_CONNECTION = ("host", "connection", "content-length", "transfer-encoding")


class Server:
    """One `kakera serve` on a port of its own, and the way to it."""

    def __init__(self, command: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._process = subprocess.Popen([*shlex.split(command), "--port", str(port)])
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None)
        self._health = f"http://127.0.0.1:{port}/health"
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command} did not start (status {self._process.poll()})")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return httpx.get(self._health, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def check_health(self) -> None:
        """Serve asks now and then, and replaces a server that does not answer for a while."""
        if not self._answers():
            raise RuntimeError("the server is gone or makes no progress")

    async def __call__(self, request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in OF_THE_CONNECTION}
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = self._http.build_request(request.method, url, headers=headers, content=await request.body())
        try:
            answer = await self._http.send(asked, stream=True)
        except httpx.TransportError:  # it has just died; check_health will notice
            return Response("this server is gone; send it again", 503, {"Retry-After": "1"})
        kept = {name: value for name, value in answer.headers.items() if name not in OF_THE_CONNECTION}
        return StreamingResponse(_pieces(answer), answer.status_code, kept)

    def __del__(self) -> None:
        """After the last request: SIGTERM has it keep its cache on disk, if it has one there."""
        self._process.terminate()
        self._process.wait(60)


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()  # also when the client leaves: the server then ends the request


def build(args: dict[str, str]) -> Application:
    """`command`: how to start a server. `gpus` and `cpus`: of each. `servers`: how many; with `most` beyond that, as
    many as `requests` running ones a server (8) call for."""
    servers = int(args.get("servers", "1"))
    options = {
        "ray_actor_options": {"num_gpus": float(args.get("gpus", "0")), "num_cpus": float(args.get("cpus", "1"))},
        "max_ongoing_requests": 256,
        "health_check_period_s": 5,
        "graceful_shutdown_timeout_s": DRAIN_SECONDS,
        "request_router_config": RequestRouterConfig(
            request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
        ),
    }
    if "most" in args:
        options["autoscaling_config"] = {
            "min_replicas": servers,
            "max_replicas": int(args["most"]),
            "target_ongoing_requests": float(args.get("requests", "8")),
        }
    else:
        options["num_replicas"] = servers
    return serve.deployment(Server).options(**options).bind(args["command"])
