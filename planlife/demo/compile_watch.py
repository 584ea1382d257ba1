"""What Triton compiles, counted by Triton and not by planlife."""

from __future__ import annotations

from typing import Any

import triton


class CompileWatch:
    """Counts every kernel that this process's Triton compiles while the watch is entered, whoever asks for it.

    A kernel from Triton's cache on disk counts too: loading it stalls as well. The interpreter compiles none.
    """

    def __init__(self) -> None:
        self.num_compiles = 0
        self._previous: Any = None

    def __enter__(self) -> CompileWatch:
        runtime = triton.knobs.runtime
        self._previous, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, self._count
        return self

    def __exit__(self, *exc_info: object) -> None:
        triton.knobs.runtime.jit_post_compile_hook = self._previous

    def _count(self, **details: Any) -> Any:
        self.num_compiles += 1
        return self._previous(**details) if self._previous is not None else None
