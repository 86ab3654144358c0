"""Labels are shifted in one place: each position predicts the next token of its own document."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from forge_core.loss import IGNORE, next_token_targets

E = 0
PACKED = [5, 6, E, 7, 8, E, E, 9]
DOCUMENTS = [0, 0, 0, 1, 1, 1, 2, 3]
EXPECTED = [6, E, IGNORE, 8, E, IGNORE, IGNORE]
KINDS = {"numpy": np.array, "torch": torch.tensor}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


def listed(targets: Any) -> list[Any]:
    assert targets.dtype in (np.int64, torch.int64)
    return list(targets.tolist())


def test_end_of_text_is_predicted_and_predicts_nothing(make: Any) -> None:
    """The last input is a document of its own, an end-of-text alone; 9 begins another."""
    inputs, documents = make(PACKED[:-1]), make(DOCUMENTS[:-1])
    assert listed(next_token_targets(inputs, documents, following=IGNORE)) == EXPECTED
    assert listed(next_token_targets(inputs, make(DOCUMENTS), following=PACKED[-1])) == EXPECTED
    assert listed(next_token_targets(make(PACKED), make(DOCUMENTS))[:-1]) == EXPECTED


def test_without_documents_only_the_last_position_lacks_a_target(make: Any) -> None:
    assert listed(next_token_targets(make([1, 2, 3]))) == [2, 3, IGNORE]
    assert listed(next_token_targets(make([1, 2, 3]), following=4)) == [2, 3, 4]


def test_following_counts_where_its_document_is_not_told(make: Any) -> None:
    assert listed(next_token_targets(make([1, 2, 3]), make([0, 1, 1]), following=4)) == [IGNORE, 3, 4]


def test_rows_are_independent_and_following_is_per_row(make: Any) -> None:
    labels, documents = make([[1, 2, 3], [4, 5, 6]]), make([[0, 0, 0], [0, 0, 1]])
    assert listed(next_token_targets(labels, documents)) == [[2, 3, IGNORE], [5, IGNORE, IGNORE]]
    assert listed(next_token_targets(labels, documents, make([7, 8]))) == [[2, 3, 7], [5, IGNORE, 8]]
    assert listed(next_token_targets(labels, make([0, 0, 1]))) == [[2, IGNORE, IGNORE], [5, IGNORE, IGNORE]]


def test_labels_that_are_not_supervised_stay_so(make: Any) -> None:
    """A prompt of two tokens: its last position predicts the answer's first token."""
    assert listed(next_token_targets(make([IGNORE, IGNORE, 7, 8]))) == [IGNORE, 7, 8, IGNORE]


def test_one_token_and_none(make: Any) -> None:
    assert listed(next_token_targets(make([3]))) == [IGNORE]
    assert listed(next_token_targets(make([3]), following=4)) == [4]
    assert next_token_targets(np.zeros((2, 0), dtype=np.int64), following=4).shape == (2, 0)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32])
def test_narrow_tokens_are_widened_before_they_hold_minus_100(dtype: Any) -> None:
    tokens = np.array([65535, 1, 2], dtype=dtype)
    assert listed(next_token_targets(tokens, np.array([0, 0, 1], dtype=np.int32))) == [1, IGNORE, IGNORE]
    assert tokens.tolist() == [65535, 1, 2]


def test_the_argument_is_not_written_to(make: Any) -> None:
    labels = make([1, 2, 3])
    next_token_targets(labels, make([0, 1, 1]), following=9)
    assert labels.tolist() == [1, 2, 3]


def test_documents_of_another_length_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"documents \(4,\) do not go with labels \(3,\)"):
        next_token_targets(make([1, 2, 3]), make([0, 0, 0, 1]))


def test_data_workers_need_no_torch() -> None:
    code = (
        "import sys, numpy\n"
        "from forge_core.loss import next_token_targets\n"
        "assert next_token_targets(numpy.array([1, 2])).tolist() == [2, -100]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
