"""Files of JSON that Python's reader gives up on, or that are not what their names say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.commands.main import main
from forge_core.data.chat_template import TokenizerTemplate
from forge_core.errors import ConfigError, DataError

DEEP = "[" * 100_000 + "]" * 100_000


def test_a_line_that_is_nested_too_deeply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{{"text": "b", "more": {DEEP}}}\n')
    assert main(["data", "prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "a.jsonl:2: not a line of JSON" in capsys.readouterr().err


def test_a_tokenizer_that_is_nested_too_deeply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text(DEEP)
    assert main(["check", "quickstart", f"--data.tokenizer={tmp_path}"]) == 2
    assert "tokenizer.json is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("tokenizer_config.json", b"{", ConfigError),
        ("tokenizer_config.json", b"[]", DataError),
        ("tokenizer_config.json", b'{"chat_template": [1, {"name": "default"}]}', DataError),
        ("chat_template.jinja", b"\xff", DataError),
    ],
)
def test_a_chat_template_that_is_none(
    name: str, content: bytes, error: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    tokenizer: Any = SimpleNamespace(name=str(tmp_path))
    with pytest.raises(error, match=r"not JSON|brings no chat template|cannot read"):
        TokenizerTemplate(tokenizer)
