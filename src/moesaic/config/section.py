"""What all sections of a recipe are made of. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Whose name and meaning a field keeps, so that a reader who comes from there knows it already.
Origin = Literal["FSDPTurbo", "LLaMA-Factory v1", "Hugging Face", "verl", "moesaic"]
FSDPTURBO: Origin = "FSDPTurbo"
LF: Origin = "LLaMA-Factory v1"
HF: Origin = "Hugging Face"
VERL: Origin = "verl"
OURS: Origin = "moesaic"


def about(
    origin: Origin,
    description: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    strict: bool | None = None,
) -> Any:
    """Annotation of a field: whose it is, what it means, and the numbers it accepts."""
    extra: dict[str, Any] = {"origin": origin}
    return Field(description=description, json_schema_extra=extra, ge=ge, gt=gt, lt=lt, le=le, strict=strict)


def as_tuple(data: Any) -> Any:
    """One value where a list may be given; null is an empty one."""
    if data is None:
        return ()
    return tuple(data) if isinstance(data, list | tuple) else (data,)


class Section(BaseModel):
    """Unknown keys, values of another type and non-finite numbers are refused; nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
