"""Which path goes where.  Before the model is warm and after SIGTERM, everything but health answers 503."""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from nestpipe.serve.http.body import Receive
from nestpipe.serve.http.infer import Inference, Send, answer_error
from nestpipe.serve.http.page import live_page
from nestpipe.serve.http.recording import Recording
from nestpipe.serve.http.request import CONTEXT, INPUTS, OUTPUT
from nestpipe.serve.instance.instance import Instance
from nestpipe.serve.instance.loader import LoadError
from nestpipe.version import VERSION


class App:
    """The ASGI application of one instance.  `control` adds what changes it: model loads."""

    def __init__(self, model: str, control: bool = False, identity: str | None = None) -> None:
        self.model, self.control = model, control
        self.identity = identity or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self.draining = False
        self._instance: Instance | None = None
        self._inference: Inference | None = None
        self._infer, self._preinfer = f"/v2/models/{model}/infer", f"/v2/models/{model}/preinfer"
        self._routes = Starlette(routes=self._routing())

    def serve(self, instance: Instance, recording: Recording | None = None) -> None:
        """From now on the instance is ready."""
        self._inference = Inference(self.model, self.identity, instance, recording)
        self._instance = instance

    def serve_like(self, other: App) -> None:
        """The same instance on another port."""
        self._inference, self._instance = other._inference, other._instance

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path in (self._infer, self._preinfer):
            if self._inference is None or self.draining:
                why = "the instance is shutting down" if self.draining else "the model is not warm yet"
                await answer_error(send, 503, why, [(b"retry-after", b"1")], close=True)
            elif path == self._infer and scope["method"] == "POST":
                await self._inference.infer(scope, receive, send)
            elif path == self._preinfer and scope["method"] in ("POST", "DELETE"):
                await self._inference.preinfer(scope, receive, send)
            else:
                await answer_error(send, 405, f"{scope['method']} is not for {path}", [])
            return
        await self._routes(scope, receive, send)  # type: ignore[arg-type]

    def _routing(self) -> list[Route]:
        routes = [
            Route("/", self._page),
            Route("/v2", self._server),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route("/v2/models/{model}", self._metadata),
            Route("/v2/models/{model}/ready", self._model_ready),
            Route("/metrics", self._metrics),
            Route("/debug/slow", self._slow),
            Route("/debug/page", self._page_data),
        ]
        if self.control:
            routes += [
                Route("/v2/repository/models/{model}/load", self._load, methods=["POST"]),
                Route("/v2/repository/index", self._index, methods=["POST"]),
            ]
        return routes

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(live_page(self.model))

    async def _server(self, request: Request) -> Response:
        extensions = ["binary_tensor_data", "preinfer", *(["model_repository"] if self.control else [])]
        return JSONResponse({"name": "nestpipe", "version": VERSION, "extensions": extensions})

    async def _live(self, request: Request) -> Response:
        alive = self._instance is None or self._instance.compute.alive
        return Response(status_code=200 if alive else 503)

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._instance is not None and not self.draining else 503)

    async def _model_ready(self, request: Request) -> Response:
        return await self._ready(request) if request.path_params["model"] == self.model else self._unknown(request)

    def _unknown(self, request: Request) -> Response:
        name = request.path_params["model"]
        return JSONResponse({"error": f"no model '{name}' here: this instance serves '{self.model}'"}, 404)

    async def _metadata(self, request: Request) -> Response:
        if request.path_params["model"] != self.model:
            return self._unknown(request)
        if self._instance is None:
            return JSONResponse({"error": "the model is not warm yet"}, 503)
        actions = list(self._instance.actions)
        single = ("now", "history_start")
        return JSONResponse(
            {
                "name": self.model,
                "versions": self._instance.compute.snapshot["versions"],
                "platform": "nestpipe_relay",
                "inputs": [
                    {"name": name, "datatype": datatype, "shape": [1 if name in single else -1]}
                    for name, datatype in {
                        **INPUTS,
                        **{CONTEXT + name: "INT64" for name in self._instance.context},
                    }.items()
                ],
                "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": [-1, len(actions)]}],
                "parameters": {
                    "actions": actions,
                    "block": self._instance.block,
                    "max_length": self._instance.max_length,
                    "instance": self.identity,
                },
            }
        )

    async def _metrics(self, request: Request) -> Response:
        if self._inference is None:
            return Response(status_code=503)
        return Response(self._inference.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _slow(self, request: Request) -> Response:
        return JSONResponse([] if self._inference is None else self._inference.slow.kept())

    async def _page_data(self, request: Request) -> Response:
        if self._inference is None or self._instance is None:
            return JSONResponse({"ready": False})
        return JSONResponse(
            {
                "ready": not self.draining,
                "instance": self.identity,
                "now": self._instance.compute.snapshot,
                "trouble": self._instance.loader.trouble,
                "seconds": self._inference.metrics.recent(),
                "slow": self._inference.slow.kept()[:20],
            }
        )

    async def _load(self, request: Request) -> Response:
        if request.path_params["model"] != self.model:
            return self._unknown(request)
        if self._instance is None:
            return JSONResponse({"error": "the model is not warm yet"}, 503)
        try:
            version = await asyncio.to_thread(self._instance.loader.load)
        except LoadError as error:
            return JSONResponse({"error": error.one_line()}, 409)
        return JSONResponse({"version": version})

    async def _index(self, request: Request) -> Response:
        state = "READY" if self._instance is not None else "LOADING"
        version = self._instance.version if self._instance is not None else ""
        return JSONResponse([{"name": self.model, "version": version, "state": state}])
