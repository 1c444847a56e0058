"""`response_format`: what an answer's text must be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from formats.errors import RequestError
from inference.requests.constraint import Constraint
from inference.server.schema.common import Body, JsonObject


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object; the prompt should ask for one."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON Schema with a name.

    Attributes:
        name: Of what it describes.
        description: What it is for; not used.
        schema: The schema; without one, any JSON object.
        strict: Whether answers keep to it; they do in any case.
    """

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


def constraint_of(response_format: ResponseFormat | None) -> Constraint | None:
    """What the engine is told of it.

    Raises:
        RequestError: a schema is too large or too deep, or none.
    """
    schema = None
    if isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.json_schema
    elif not isinstance(response_format, JsonObjectFormat):
        return None
    try:
        return Constraint.json_object() if schema is None else Constraint.json_schema(schema)
    except RequestError as error:
        raise named_error(error, "response_format") from error


def named_error(error: RequestError, field: str) -> RequestError:
    """An error of a constraint with the name of the field that asked for it; others as they are."""
    if error.param != "constraint":
        return error
    return RequestError(str(error).replace("constraint", field, 1), field)
