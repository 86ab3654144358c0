"""A hook of mkdocs: puts the reference of all tables where docs/configuration.md asks for it."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

PLACE = "<!-- forge config reference -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark by what the command prints, its headings two levels down."""
    if PLACE not in markdown:
        return markdown
    command = [sys.executable, "-m", "forge_core", "config", "reference"]
    reference = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    body = reference.partition("\n## ")[2]
    return markdown.replace(PLACE, re.sub(r"^## ", "### ", f"## {body}", flags=re.MULTILINE))
