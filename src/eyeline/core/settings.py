"""The one kind of settings record: frozen, checked when it is made, and refusing keys that it does not know.

A record is declared beside the code that obeys it (`train/optim.py` has the optimizers', `data/sources.py` the sources').
`train/run.py` joins them into `Run`; `recipes/read.py` fills them from YAML.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """A frozen record of settings. Unknown keys, NaN and infinities are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
