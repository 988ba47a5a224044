"""Read by schemathesis: keeps answers short where the body leaves their length to the server."""

from __future__ import annotations

from typing import Any

import schemathesis

LENGTHS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    name = LENGTHS.get(case.operation.path)
    if name and isinstance(case.body, dict) and case.body.get(name) is None:
        case.body[name] = 1
