"""`python -m forge_core` is the `forge` command."""

from __future__ import annotations

import sys


def run() -> None:
    """Entry point of the console script. The command is imported here, where Ctrl-C is one line as well."""
    try:
        from forge_core.commands.main import main
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        sys.exit(130)
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
