"""Compile decode kernels for many specs at once, into Triton's cache on disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from planlife import PlanSpec
from planlife.kernels.triton_decode import compile_decode


def compile_ahead(specs: Sequence[PlanSpec]) -> None:
    """This process then finds all of it there. One that cannot be compiled is left to its test."""
    specs = list(dict.fromkeys(specs))
    workers = min(len(specs), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(compile_decode, spec, "cuda:0") for spec in specs]:
            future.exception()
