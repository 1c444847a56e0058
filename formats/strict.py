"""What configurations of ours are made of."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen configuration that rejects unknown keys and does not coerce types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
