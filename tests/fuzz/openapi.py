"""The API as an OpenAPI document, and schemathesis over it: `python -m tests.fuzz.openapi --out DIR`; schemathesis is no dependency.

The server publishes no such document. This one is FastAPI's own list of the routes, completed with the fields that the desk takes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from tests.fuzz.api import open_server
from tests.fuzz.box import ADAPTER, Box
from tests.videogen.serve.fakes import serving
from videogen.serve.api import PREVIEW, VARIANTS, build_api
from videogen.serve.desk import FIELDS

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,response_headers_conformance"
_TEXT, _FILE = {"type": "string"}, {"type": "string", "format": "binary"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string", "minLength": 1}, "type": _TEXT},
        }
    },
}
_VIDEO = {"type": "object", "required": ["id", "object", "status", "progress", "created_at", "seconds", "size", "extra"]}
_TYPES: dict[str, dict[str, Any]] = {
    "prompt": {"type": "string", "minLength": 1, "maxLength": 200},
    "size": {"enum": ["160x96", "96x160", "128x96", "97x64"]},
    "seconds": {"enum": [1, 2.5, "5", 10_000, "long"]},
    "frames": {"type": "integer", "minimum": 20, "maximum": 350},
    "steps": {"type": "integer", "minimum": 1, "maximum": 1000},
    "seed": {"type": "integer", "minimum": -1, "maximum": 2**63},
    "lora": {"type": "array", "maxItems": 2, "items": {"enum": [ADAPTER, "missing.safetensors"]}},
    "round_size": {"type": "boolean"},
}


def document(app: FastAPI, recipes: list[str]) -> dict[str, Any]:
    """FastAPI's document of the routes with bodies, queries and answers."""
    found: dict[str, Any] = app.openapi()
    fields = {name: _TYPES.get(name, {"enum": recipes} if name == "recipe" else _TEXT) for name in FIELDS}
    body = {"type": "object", "required": ["prompt"], "properties": fields, "additionalProperties": False}
    upload = body | {"properties": fields | {"input_reference": _FILE, "last_image": _FILE}}
    found["paths"]["/v1/videos"]["post"]["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": body}, "multipart/form-data": {"schema": upload}},
    }
    _query(
        found["paths"]["/v1/videos"]["get"],
        limit={"type": "integer", "minimum": 1, "maximum": 100},
        order={"enum": ["asc", "desc"]},
        after=_TEXT,
    )
    _query(found["paths"]["/v1/videos/{video_id}/content"]["get"], variant={"enum": [*VARIANTS, *PREVIEW]}, until=_TEXT, sign=_TEXT)
    for path, methods in found["paths"].items():
        for operation in methods.values():
            is_video = path in ("/v1/videos", "/v1/videos/{video_id}") and operation is not methods.get("delete")
            answer = {"application/json": {"schema": _VIDEO if is_video and operation is not found["paths"]["/v1/videos"]["get"] else {}}}
            kinds = answer if not path.endswith(("/content", "/events", "/metrics")) else {"*/*": {"schema": {}}}
            operation["responses"] = {"200": {"description": "done", "content": kinds}}
            operation["responses"]["4XX"] = {"description": "refused", "content": {"application/json": {"schema": _ERROR}}}
    of_video = [each for path, methods in found["paths"].items() if "{video_id}" in path for each in methods.values()]
    links = {
        each["operationId"]: {"operationId": each["operationId"], "parameters": {"video_id": "$response.body#/id"}} for each in of_video
    }
    found["paths"]["/v1/videos"]["post"]["responses"]["200"]["links"] = links
    return found


def _query(operation: dict[str, Any], **parameters: dict[str, Any]) -> None:
    known = operation.setdefault("parameters", [])
    known += [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in parameters.items()]


def main() -> int:
    """Serve in this process, run schemathesis in another one against it; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.openapi")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=200, help="of each operation and phase")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if find_spec("schemathesis") is None:
        print("schemathesis: got no such package, expected it in the environment; pip install schemathesis")  # noqa: T201
        return 3
    args.out.mkdir(parents=True, exist_ok=True)
    server = open_server(Box(Path(tempfile.mkdtemp())))
    path = args.out / "openapi.json"
    path.write_text(json.dumps(document(build_api(server.services)[0], server.services.desk.recipes()), indent=1))
    with serving(server.services) as address:
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            str(path),
            "--url",
            address,
            "--checks",
            CHECKS,
            "--seed",
            str(args.seed),
        ]
        command += ["--max-examples", str(args.examples), "--phases", "examples,coverage,fuzzing,stateful", "--mode", "all", "--no-color"]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, cwd=args.out, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
