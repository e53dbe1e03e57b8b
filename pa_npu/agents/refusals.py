"""Refusals of the gateway, in the form in which OpenAI's clients read errors."""

from __future__ import annotations

import json

from aiohttp import web


class Refused(Exception):
    """A request that is not answered: the HTTP status, a line, and what clients branch on (code, param)."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def response(self) -> web.Response:
        kind = {401: "authentication_error", 404: "not_found_error"}.get(self.status, "invalid_request_error")
        error = {
            "message": str(self),
            "type": kind if self.status < 500 else "server_error",
            "param": self.param,
            "code": self.code,
        }
        headers = {"x-should-retry": "false"} if self.status < 500 else {}
        return web.Response(
            status=self.status,
            body=json.dumps({"error": error}).encode(),
            content_type="application/json",
            headers=headers,
        )
