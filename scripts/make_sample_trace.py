"""Writes planlife/demo/sample_trace.csv: made-up requests for a demo on a CPU. The same file on every run."""

from __future__ import annotations

import random
from pathlib import Path

NUM_REQUESTS = 400
MEAN_GAP_MS = 250
LONG_EVERY = 40  # one request in so many has a context that owns a plain kernel's critical path
SAMPLE = Path(__file__).resolve().parent.parent / "planlife" / "demo" / "sample_trace.csv"


def main() -> None:
    chance = random.Random(20)
    lines = ["timestamp_ms,input_tokens,output_tokens"]
    now_ms = 0.0
    for index in range(NUM_REQUESTS):
        if index % LONG_EVERY == LONG_EVERY - 1:
            input_tokens = chance.randint(1500, 3500)
        else:
            input_tokens = min(900, max(20, round(chance.lognormvariate(5.0, 0.9))))
        output_tokens = min(120, max(4, round(chance.lognormvariate(3.2, 0.7))))
        lines.append(f"{round(now_ms)},{input_tokens},{output_tokens}")
        now_ms += chance.expovariate(1 / MEAN_GAP_MS)
    SAMPLE.write_text("\n".join(lines) + "\n", newline="\n")


if __name__ == "__main__":
    main()
