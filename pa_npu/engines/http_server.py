"""Duties of every engine's HTTP server: it checks the API key and names itself. Standard library only.

Every path but /health needs the key, which is the environment's VLLM_API_KEY and travels as
`Authorization: Bearer KEY`. Every answer carries two headers, so that a client need not believe its
own records (I1):

    pa-instance         random per start: after a restart an engine has the weights of its model
                        directory again
    pa-weight-version   version of the weights loaded last; `none` before the first load, and during
                        or after a load that did not succeed; `changed` if it was another one when
                        the request came
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Iterable

KEY_VARIABLE = "VLLM_API_KEY"
KEY_FILE = "api_key"  # in the run directory
OPEN_PATH = "/health"
REFUSAL = (
    json.dumps(
        {"error": {"message": f"send this engine's API key: Authorization: Bearer ${KEY_VARIABLE}"}}
    )
    + "\n"
)

COMPACT_TYPE = "application/vnd.pa-npu.responses"
"""The form of an answer that pa_npu.engines.compact_answer has; a client asks for it by `Accept`."""
INSTANCE_HEADER = "pa-instance"
VERSION_HEADER = "pa-weight-version"
NO_VERSION = "none"
CHANGED_VERSION = "changed"


def authorised(authorization: Iterable[bytes], key: str) -> bool:
    """Returns whether the one Authorization header of a request carries the key.

    Takes the same time for every wrong key.
    """
    values = list(authorization)
    if len(values) != 1 or not key:
        return False
    scheme, _, sent = values[0].partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(sent, key.encode())


def accepts_compact(values: Iterable[bytes]) -> bool:
    """Returns whether a request with these `Accept` headers wants a compact answer."""
    return any(value.strip() == COMPACT_TYPE.encode() for value in values)


class EngineIdentity:
    """The identity of a start of an engine, and the weight version that it holds."""

    def __init__(self) -> None:
        self.instance = secrets.token_hex(8)
        self.version: int | None = None

    def headers(self, version_before: int | None) -> dict[str, str]:
        """Returns headers of an answer. `version_before`: `version` when the request came."""
        version = NO_VERSION if self.version is None else str(self.version)
        return {
            INSTANCE_HEADER: self.instance,
            VERSION_HEADER: version if version_before == self.version else CHANGED_VERSION,
        }
