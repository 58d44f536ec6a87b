"""Numbers with bounds, as types of options."""

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=1, lt=2**63)]
CountFrom0 = Annotated[int, Field(ge=0, lt=2**63)]
MicroBatches = Annotated[int, Field(ge=1, le=2**16)]  # a report draws a box for each
Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
