"""The `planlife` command's entry point. The commands need click and rich; the library does not."""

from __future__ import annotations

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
    planlife()


if __name__ == "__main__":
    main()
