"""Evaluation by what the model answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forge_vlm.generate import generate, questions_of
from forge_vlm.table import VlmConfig

if TYPE_CHECKING:
    from forge_core import TrainingSession


def exact_match(session: TrainingSession) -> dict[str, float]:
    """The share of samples of all evaluation sets whose answer is word for word the one that they hold.

    Greedy, in at most `vlm.answer_tokens` tokens; of a conversation its first answer counts, of a packed
    sequence its first sample. Samples without a label are not asked.
    """
    length = session.config[VlmConfig].answer_tokens
    tokenizer: Any = session.data.tokenizer
    right = asked = 0
    for dataset in session.data.evaluation:
        for batch in dataset:
            prompts, answers = questions_of(batch)
            rows = generate(
                session.model,
                prompts,
                max_new_tokens=length,
                eos_id=tokenizer.eos_id,
                stop_early=session.control is None,
                temperature=0.0,
            )
            for row, answer in zip(rows, answers, strict=True):
                asked += bool(answer)
                right += bool(answer) and row == answer
            if session.check_stop():
                return {}
    if session.control is not None:
        counts = session.mesh.counts_data
        both = torch.tensor([right * counts, asked * counts], dtype=torch.float64, device=session.device)
        torch.distributed.all_reduce(both)
        right, asked = (int(number) for number in both.tolist())
    return {"": right / asked} if asked else {}
