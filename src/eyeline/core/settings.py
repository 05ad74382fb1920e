"""The one kind of settings record: frozen, checked when it is made, and refusing keys that it does not know.

A record is declared next to the code that obeys it (`train/optim.py` has the optimizers', `data/sources/sources.py` the sources').
`train/run.py` joins them into `Run`; `recipes/read.py` fills them from YAML.
"""

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """A frozen record of settings. Errors are unknown keys, NaN and infinities, and values of another type: `true` is not a number,
    `"8"` is text, `1` is not a boolean."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _lists_as_tuples(cls, values: Any) -> Any:
        """YAML and JSON have lists where a frozen record has tuples."""
        if not isinstance(values, dict):
            return values
        return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]  # a path or URL, in which ~ is the home folder
