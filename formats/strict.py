"""What configurations are made of: ours, and those of others that are read."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen configuration that rejects unknown keys and does not coerce types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Values(BaseModel):
    """Values of others' files that are read, by their types; others may stand beside them."""

    model_config = ConfigDict(frozen=True, strict=True)
