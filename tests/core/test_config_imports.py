"""The configuration layer is light: no torch, no numpy, and quick."""

from __future__ import annotations

import subprocess
import sys

LOAD = (
    "import sys\n"
    "from forge_core.config import load_config\n"
    "from forge_core.config.catalog import StaticCatalog\n"
    "load_config('quickstart', ['--model.vocab_size=300'], catalog=StaticCatalog()).to_toml()\n"
    "import forge_core.config.reference, forge_core.config.schema\n"
    "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))\n"
)


def test_loading_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_module_of_the_layer_imports_alone() -> None:
    """Also in an order that nobody tried: no module depends on another having been imported before."""
    import pkgutil

    import forge_core.config

    names = [
        module.name for module in pkgutil.walk_packages(forge_core.config.__path__, "forge_core.config.")
    ]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for known in [m for m in sys.modules if m.startswith('forge_core')]:\n"
        "        del sys.modules[known]\n"
        "    importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, *names], check=True)
