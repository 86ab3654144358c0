"""`python -m forge_core` is the `forge` command."""

from forge_core.commands.main import run

if __name__ == "__main__":
    run()
