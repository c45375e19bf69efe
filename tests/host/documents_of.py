"""Reads what --json prints as a program would: one document, described by a file of launcher/schemas."""

import json
from pathlib import Path

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from launcher import reports

FOLDER = Path(reports.__file__).with_name("schemas")
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
REGISTRY = Registry().with_resources([(schema["$id"], Resource.from_contents(schema)) for schema in SCHEMAS.values()])


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(SCHEMAS[name], registry=REGISTRY)


def read(text: str, code: int | None = None) -> dict:
    document = json.loads(text)
    validator(document["schema"]).validate(document)
    assert code is None or document["exit_code"] == code
    return document
