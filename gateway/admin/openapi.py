"""Builds the OpenAPI 3.1 document from the tables of operations and of all other routes. It serves nothing."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from gateway.admin.catalogue import Ready
from gateway.admin.inference import DescribedRoute
from gateway.admin.operation import PATH_PARAMETERS, CursorItem, Operation, ResponseInfo
from gateway.inference.run_options import (
    METADATA_BYTES_MAX,
    METADATA_MAX,
    METADATA_NAME_MAX,
    METADATA_TEXT_MAX,
    SESSION_BYTES_MAX,
    TIMEOUT_MS_MAX,
)
from gateway.listing.pages import PageItem
from gateway.listing.schemas import tidy_schema
from tenants.auth.accounts import NAME_MAX
from tenants.records.limits import RANGES

Json = dict[str, Any]

_REF: Final = "#/components/schemas/{name}"
_TOKEN: Final = "token"
# The statuses of any route: before a token is looked at, and while it is.
_ALWAYS: Final = (400, 408, 421, 431, 500, 503)
_WITH_TOKEN: Final = (401, 403)
_STATUSES: Final = {
    400: "A wrong field, query or header, which the message names",
    401: "No token, a malformed one, or one that is not in force",
    403: "Another account's path, a missing permission, another network, or a suspended account",
    404: "There is nothing of this name that the caller may see",
    405: "An adapter is asked for, and the model takes none",
    408: "The request did not arrive in time, or took too long",
    409: "In use, changed by others all the time, a name of another account or of several, or a creation with this "
    "Idempotency-Key is in progress",
    410: "The model is deprecated, and served no more",
    412: "What If-Match or If-None-Match asked for is not so",
    413: "The body is too large",
    421: "This host is not served here",
    422: "The Idempotency-Key belongs to another request; or the request was running in two crashes of its model",
    429: "A limit of the caller's, too many failed credentials of its address, or capacity that is taken for the "
    "moment; Retry-After says when to come back",
    431: "The head is too large",
    500: "The gateway or a replica failed; x-request-id finds it in the log",
    503: "The store does not answer, nothing can serve in time, or the gateway is full; Retry-After says when to come "
    "back",
}
# The codes of the envelope by which callers tell apart what a status leaves open.
CODES: Final[dict[int, tuple[int, ...]]] = {
    400: (3003, 3030, 5006, 5007, 5024, 6003),
    401: (9106, 10000),
    403: (3041, 9109, 10000),
    404: (1003, 3042, 7000, 7003),
    405: (5005, 7001),
    408: (3007, 3046),
    409: (1009, 1010),
    410: (5028,),
    412: (1012,),
    413: (3006,),
    421: (7000,),
    422: (1011, 5012),
    429: (3021, 3040, 4006, 9106),
    431: (6003,),
    500: (5000,),
    503: (3040,),
}
_PATH_SCHEMAS: Final[dict[str, Json]] = {
    "account_id": {
        "type": "string",
        "minLength": 1,
        "maxLength": NAME_MAX,
        "pattern": "^[^/]+$",
        "description": "Its id of 32 hex digits, or its name",
    },
    "token_id": {"type": "string", "pattern": f"^{PATH_PARAMETERS['token_id'].pattern}$"},
    "machine": {"type": "string", "minLength": 1, "maxLength": 512, "description": "Its name, or its address"},
    "plan": {"type": "string", "pattern": f"^{PATH_PARAMETERS['plan'].pattern}$"},
    "request_id": {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[^/]+$"},
    "model": {"type": "string", "minLength": 1, "description": "A name of the catalogue, percent-encoded"},
}
_HEADERS: Final[dict[str, Json]] = {
    "If-Match": {
        "schema": {"type": "string"},
        "description": "The ETag that the change is based on, or 412. Without it the change is made to what there is.",
    },
    "If-None-Match": {"schema": {"const": "*"}, "description": "Only what there is not yet, or 412."},
    "Idempotency-Key": {
        "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
        "description": "One effect and one answer for all requests of this key and body within 24 hours. A call of a "
        "model is charged once; where its answer comes again, which is one request for the limits, it has the header "
        "idempotent-replayed.",
    },
    "x-session-affinity": {
        "schema": {"type": "string", "maxLength": SESSION_BYTES_MAX},
        "description": "Calls of one account with the same value go to the same replica, while they can.",
    },
    "cf-aig-metadata": {
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "maxProperties": METADATA_MAX,
                    "propertyNames": {"maxLength": METADATA_NAME_MAX},
                    "additionalProperties": {"type": ["string", "number", "boolean"], "maxLength": METADATA_TEXT_MAX},
                }
            }
        },
        "description": f"Goes into the usage record, in at most {METADATA_BYTES_MAX} bytes.",
    },
    "cf-aig-request-timeout": {
        "schema": {"type": "integer", "minimum": 1, "maximum": TIMEOUT_MS_MAX},
        "description": "Milliseconds that the whole call may take, waiting included; then it ends with 408, code 3046, "
        "or, where its model is still being loaded, with 503.",
    },
    "cf-aig-zdr": {"schema": {"enum": ["true", "false"]}, "description": "Whether nothing of this call may be kept."},
}
_CREDENTIAL: Final = "An ApiToken, or a JWT of a known issuer; without Authorization, in the header x-api-key"
ERROR: Final[Json] = {
    "type": "object",
    "description": "The envelope of every error; on OpenAI's and Anthropic's paths theirs is beside it.",
    "properties": {
        "result": {"type": ["object", "null"], "maxProperties": 0},
        "success": {"const": False},
        "errors": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"code": {"type": "integer"}, "message": {"type": "string"}},
                "required": ["code", "message"],
                "additionalProperties": False,
            },
        },
        "messages": {"type": "array", "maxItems": 0},
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "OpenAI's"},
                "code": {"type": "string", "description": "OpenAI's"},
                "details": {"type": "object", "description": "Anthropic's: `error_code` says more than the status"},
            },
            "required": ["message", "type"],
            "additionalProperties": False,
        },
        "type": {"const": "error", "description": "Anthropic's"},
        "request_id": {"type": "string", "description": "Anthropic's"},
    },
    "required": ["result", "success", "errors", "messages"],
    "additionalProperties": False,
}


def openapi_document(operations: Sequence[Operation], routes: Sequence[DescribedRoute]) -> Json:
    """Describes all routes, with every status that can occur."""
    schemas = _Schemas(operations, routes)
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _route(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Hearth",
            "version": "1",
            "description": "Another method than those named here is answered with 405, another path with 404. A "
            "tenant's token is told of the operator's paths what it is told of paths that are not. Every answer has "
            "its request's id in x-request-id, always a new one; a model's that is not streamed has in cf-ai-neurons "
            "what it cost.",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas.components, "Error": ERROR},
            "responses": {str(status): _error(status) for status in _STATUSES},
            "headers": {"ETag": {"schema": {"type": "string"}, "description": "The revision, for If-Match"}},
            "securitySchemes": {_TOKEN: {"type": "http", "scheme": "bearer", "description": _CREDENTIAL}},
        },
    }


class _Schemas:
    """JSON Schemas of all types that requests and answers have."""

    def __init__(self, operations: Sequence[Operation], routes: Sequence[DescribedRoute]) -> None:
        types: list[Any] = [PageItem, CursorItem, ResponseInfo]
        for operation in operations:
            types += [operation.result, *([operation.body] if operation.takes_body else [])]
        for route in routes:
            types += [*_several(route.result), *_several(route.body), *_several(route.events)]
        schemas, self.components = msgspec.json.schema_components(types, ref_template=_REF)
        self._schemas = list(zip(types, schemas, strict=True))
        for component in self.components.values():
            tidy_schema(component)
        for name, (low, high) in RANGES.items():
            self.components["Limits"]["properties"][name]["anyOf"][0].update(minimum=low, maximum=high)

    def of(self, kinds: Any) -> Json:
        """The schema of one type, or of any of several."""
        schemas = [next(schema for known, schema in self._schemas if known == kind) for kind in _several(kinds)]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _takes_name(operation: Operation) -> bool:
    """Whether the operator may name an account, whose name several may have from before names were unique."""
    return operation.hidden and ("{account_id}" in operation.path or "account" in operation.query.__struct_fields__)


def _operation(operation: Operation, schemas: _Schemas) -> Json:
    headers = ["If-Match", "If-None-Match"] if operation.conditional else []
    headers += ["Idempotency-Key"] if operation.creates else []
    statuses = [*_ALWAYS, *_WITH_TOKEN]
    statuses += [404] if "{" in operation.path or operation.hidden else []
    statuses += [413] if operation.takes_body else []
    statuses += [409] if operation.method != "GET" or _takes_name(operation) else []
    statuses += [412] if operation.conditional else []
    statuses += [422] if operation.creates else []
    content = {"application/json": {"schema": _envelope(operation, schemas)}}
    if operation.csv:
        content["text/csv"] = {"schema": {"type": "string"}}
    answer: Json = {"description": "Done", "content": content}
    if operation.versioned:
        answer["headers"] = {"ETag": {"$ref": "#/components/headers/ETag"}}
    described: Json = {
        "operationId": _operation_id(operation.method, operation.path),
        "summary": operation.summary,
        "tags": ["operator" if operation.hidden else "account"],
        "security": [{_TOKEN: [permission.value]} for permission in operation.permissions] or [{_TOKEN: []}],
        "parameters": _parameters(operation.path, operation.query, headers),
        "responses": {"200": answer, **_errors(statuses)},
    }
    if operation.takes_body:
        described["requestBody"] = _body(operation.body, schemas, required=not operation.optional)
    return described


def _envelope(operation: Operation, schemas: _Schemas) -> Json:
    properties: Json = {
        "result": schemas.of(operation.result),
        "success": {"const": True},
        "errors": {"type": "array", "maxItems": 0},
        "messages": {"type": "array", "items": schemas.of(ResponseInfo)},
    }
    if operation.cursor:
        properties["result_info"] = schemas.of(CursorItem)
    elif operation.paged:
        properties["result_info"] = schemas.of(PageItem)
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _route(route: DescribedRoute, schemas: _Schemas) -> Json:
    statuses = [*_ALWAYS, *route.statuses, *(() if route.open else _WITH_TOKEN)]
    statuses += [404] if "{" in route.path else []
    content: Json = {route.plain or "application/json": {"schema": schemas.of(route.result)}}
    if route.events is not None:
        content["text/event-stream"] = _stream(schemas.of(route.events))
    described: Json = {
        "operationId": _operation_id(route.method, route.path),
        "summary": route.summary,
        "tags": ["gateway" if route.open else "inference"],
        "security": [
            *([{}] if route.open else []),
            *({_TOKEN: [permission.value]} for permission in route.permissions),
        ],
        "parameters": _parameters(route.path, route.query, route.headers),
        "responses": {"200": {"description": "Done", "content": content}, **_errors(statuses)},
    }
    if route.result is Ready:
        described["responses"]["503"] = {"description": "Not now", "content": content}
    if route.body is not None:
        described["requestBody"] = _body(route.body, schemas, required=True)
    return described


def _several(kinds: Any) -> tuple[Any, ...]:
    """Returns a tuple of types; None is no type."""
    return kinds if isinstance(kinds, tuple) else () if kinds is None else (kinds,)


def _stream(event: Json) -> Json:
    """OpenAPI 3.1 cannot describe streams of events: `x-event` is the schema of each `data:`, the last
    of which may be an error."""
    description = (
        "Server-sent events: `data:` with a JSON document each, at last `data: [DONE]` where the dialect has that."
    )
    return {
        "schema": {"type": "string", "description": description},
        "x-event": {"anyOf": [event, {"$ref": "#/components/schemas/Error"}]},
    }


def _body(kind: Any, schemas: _Schemas, *, required: bool) -> Json:
    return {"required": required, "content": {"application/json": {"schema": schemas.of(kind)}}}


def _parameters(path: str, query: Any, headers: Iterable[str]) -> list[Json]:
    fields = msgspec.json.schema_components([query])[1][query.__name__]["properties"]
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    return [
        *({"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]} for name in names),
        *({"name": name, "in": "query", "schema": _without_null(schema)} for name, schema in fields.items()),
        *({"name": name, "in": "header", **_HEADERS[name]} for name in headers),
    ]


def _without_null(schema: Json) -> Json:
    """The schema of a field that may be left out but cannot be null."""
    present = next((member for member in schema.get("anyOf", ()) if member != {"type": "null"}), schema)
    return {name: value for name, value in present.items() if name != "default" or value is not None}


def _errors(statuses: Iterable[int]) -> Json:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(set(statuses))}


def _error(status: int) -> Json:
    coded = {"items": {"properties": {"code": {"enum": list(CODES[status])}}}}
    response: Json = {
        "description": _STATUSES[status],
        "content": {
            "application/json": {"schema": {"$ref": _REF.format(name="Error"), "properties": {"errors": coded}}}
        },
    }
    if status in (429, 503):
        response["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds"}}
    return response


def _operation_id(method: str, path: str) -> str:
    words = [part.strip("{}").replace(".", "_") for part in path.removeprefix("/client/v4").split("/") if part]
    return "_".join([method.lower(), *words])
