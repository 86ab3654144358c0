"""Import every module of installed packages: `python import_everything.py forge-core forge-moe`.

Run where only declared dependencies are installed, it finds those that were not declared. A module may need a
package that is an extra of its own package; anything else that is missing fails.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from importlib import metadata


def main(distributions: list[str]) -> int:
    """Import all of it; returns 1 if a module needs what its package does not declare."""
    failures = []
    for distribution in distributions:
        package = importlib.import_module(distribution.replace("-", "_"))
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                failures += problem(module.name, extras(distribution))
    print("\n".join(failures) or f"imported every module of {', '.join(distributions)}")
    return 1 if failures else 0


def problem(module: str, optional: set[str]) -> list[str]:
    """What is missing for `module`, unless it is one of the `optional` import names."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in optional:
            return [f"{module} needs {error.name}, which its package does not declare"]
    return []


def extras(distribution: str) -> set[str]:
    """First words of the requirements behind extras: `mlflow` for `mlflow-skinny>=2; extra == "mlflow"`."""
    requirements = metadata.requires(distribution) or []
    return {
        re.split(r"[^A-Za-z0-9_]", requirement)[0]
        for requirement in requirements
        if "extra ==" in requirement
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
