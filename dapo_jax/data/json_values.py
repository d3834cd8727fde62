"""Host: values that JSON lacks."""

import base64
import datetime
import decimal
import uuid
from typing import Any


def plain(value: Any) -> Any:
    """What stands in JSON for a value that it lacks, as `encode_request` says. TypeError where nothing does."""
    if isinstance(value, decimal.Decimal | uuid.UUID | datetime.timedelta):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):  # a NumPy array or scalar
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no form in JSON")
