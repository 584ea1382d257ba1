"""Writes a step log of a day of a busy engine: 10 million steps whose row counts wander between 1 and 256.

python examples/busy_day.py day.jsonl.gz
planlife simulate --trace day.jsonl.gz
"""

from __future__ import annotations

import random
import sys

from planlife.step_log import StepLogWriter

NUM_STEPS = 10_000_000
STEP_US = 8_640
MAX_ROWS = 256


def write_day(path: str, num_steps: int = NUM_STEPS) -> None:
    """Every fourth step a request comes or goes; one in 200 the batch is another one altogether."""
    chance = random.Random(1)
    rows = MAX_ROWS // 2
    with StepLogWriter(path) as writer:
        for _ in range(num_steps):
            draw = chance.random()
            if draw < 0.25:
                rows = min(max(rows + chance.choice((-1, 1)), 1), MAX_ROWS)
            elif draw < 0.255:
                rows = chance.randint(1, MAX_ROWS)
            writer.add(STEP_US, rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/busy_day.py FILE")
    write_day(sys.argv[1])
