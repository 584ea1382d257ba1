"""The `planlife` command's entry point. The commands need click and rich; the library does not."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the `planlife` command with the process's arguments, and exit."""
    try:
        from .commands import planlife
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in ("click", "rich"):
            raise
        print(f"planlife: the command line needs {package}: pip install 'planlife[cli]'", file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of sites and values of variables may have letters that the terminal's encoding does not.
            stream.reconfigure(errors="backslashreplace")
    planlife()


if __name__ == "__main__":
    main()
