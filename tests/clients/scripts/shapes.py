"""Answers as pydantic models, for clients that have pydantic."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Capital(BaseModel):
    """A capital."""

    capital: str = Field(max_length=24)
    population: int = Field(ge=0, le=99999999)


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=24)
