"""Import every module of installed packages: `python import_everything.py forge-core forge-moe`.

Run where only declared dependencies are installed, it finds what was not declared, also where a function
imports it. What an extra of the package brings may be missing.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
from importlib import metadata, util
from pathlib import Path


def main(distributions: list[str]) -> int:
    """Import all of it; returns 1 if something needs what its package does not declare."""
    failures: list[str] = []
    for distribution in distributions:
        package = importlib.import_module(distribution.replace("-", "_"))
        optional = extras(distribution)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                failures += missing_on_import(module.name, optional) or missing_inside(module.name, optional)
    print("\n".join(failures) or f"imported every module of {', '.join(distributions)}")
    return 1 if failures else 0


def missing_on_import(module: str, optional: set[str]) -> list[str]:
    """What importing `module` lacks, unless it is one of the `optional` import names."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in optional:
            return [f"{module} needs {error.name}, which its package does not declare"]
    return []


def missing_inside(module: str, optional: set[str]) -> list[str]:
    """What any import statement of `module` names that is neither installed nor `optional`."""
    spec = util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    named = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named.add(node.module.partition(".")[0])
    lacking = sorted(name for name in named - optional if util.find_spec(name) is None)
    return [f"{module} needs {name}, which its package does not declare" for name in lacking]


IMPORTED_AS = {"pillow": "PIL", "scikit-learn": "sklearn"}


def extras(distribution: str) -> set[str]:
    """Import names behind extras: `lm_eval` for `lm-eval`; also first words: `mlflow` for `mlflow-skinny`."""
    requirements = [entry for entry in metadata.requires(distribution) or [] if "extra ==" in entry]
    names = {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in requirements}
    found = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}
    return found | {name.partition("-")[0] for name in names if not name.startswith("forge-")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
