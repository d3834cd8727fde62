"""What verl's published scripts and trainer configs set: key lists under tests/from_verl/data."""

import json
from pathlib import Path

DATA = Path(__file__).parent / "from_verl" / "data"


def lines_of(name: str) -> list[str]:
    return [line for line in (DATA / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]


TRAINER = {
    version: {key: json.loads(value) for key, value in (line.split(": ", 1) for line in lines_of(f"trainer_{version}"))}
    for version in ("0.7.0", "0.9.0")
}
