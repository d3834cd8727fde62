"""Host: JSON for values that it has no type for."""

import base64
import datetime
import decimal
import uuid
from typing import Any


def plain(value: Any) -> Any:
    """The JSON value for one that JSON has no type for, as in `encode_request`. TypeError if none exists."""
    if isinstance(value, decimal.Decimal | uuid.UUID | datetime.timedelta):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):  # a NumPy array or scalar
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no form in JSON")
