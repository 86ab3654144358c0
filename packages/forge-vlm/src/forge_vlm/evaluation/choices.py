"""Multiple choice by likelihood."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge_core.config.tables import ModelConfig
from forge_core.model.generate import evaluating
from forge_vlm.evaluation.metric import Seen, VlmMetric
from forge_vlm.evaluation.options import MultipleChoiceOptions
from forge_vlm.generate import Reading


class MultipleChoice(VlmMetric):
    """The share of questions whose right choice is the likeliest, and where there are any `left_out`, how
    many questions count nowhere since a choice of theirs would end beyond the length of the model.

    The model reads a question and its images once; each choice goes on from what it has read.
    """

    options: MultipleChoiceOptions

    def measure(self, seen: Seen) -> Sequence[float]:
        if not seen.most_choices:
            return 0.0, 0.0, 0.0
        every = [
            () if facts is None or not right else facts.choices
            for facts, right in zip(seen.facts, seen.right, strict=True)
        ]
        longest = self.session.config[ModelConfig].max_seq_len
        choices, left_out = fitting(every, seen.prompts.lengths, longest)
        with evaluating(self.session.model):
            scores, lengths = likelihoods(self.session.model, seen, choices)
        if self.options.score == "mean":
            scores = scores / lengths.clamp(min=1)
        hits = asked = 0
        for row, (offered, facts) in enumerate(zip(choices, seen.facts, strict=True)):
            if offered and facts is not None:
                best = int(scores[row, : len(offered)].argmax())
                hits, asked = hits + (best == facts.right), asked + 1
        return float(hits), float(asked), float(left_out)

    def result(self, sums: Sequence[float]) -> dict[str, float]:
        found = super().result(sums)
        return {**found, "left_out": sums[2]} if sums[2] else found


def fitting(
    choices: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], most: int | None
) -> tuple[list[Sequence[Sequence[int]]], int]:
    """The choices of rows that fit, none of the others, and how many those are.

    Args:
        choices: ids of each, by row.
        lengths: of the prompts. most: tokens that the model has positions for; None: any number.
    """
    # the last token of a choice is predicted, and not read
    ends = [
        length + max(map(len, offered), default=0) - 1
        for length, offered in zip(lengths, choices, strict=True)
    ]
    fits = [most is None or end <= most or not offered for end, offered in zip(ends, choices, strict=True)]
    kept = [offered if good else () for offered, good in zip(choices, fits, strict=True)]
    return kept, fits.count(False)


def likelihoods(
    model: object, seen: Seen, choices: Sequence[Sequence[Sequence[int]]]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities in nats of each choice of each row after its prompt, and how many tokens it has.

    Args:
        choices: ids of each, by row; a row may have none, and none has more than `seen.most_choices`.

    Returns:
        (B, C) fp64 sums over the tokens of a choice, 0 where there is none, and (B, C) their number.
    """
    room = max(1, max((len(ids) for row in choices for ids in row), default=1) - 1)
    reading = Reading(model, seen.prompts, room)
    scores = torch.zeros(len(choices), seen.most_choices, dtype=torch.float64)
    lengths = torch.zeros(len(choices), seen.most_choices)
    first = torch.log_softmax(reading.logits.double(), -1)
    for number in range(seen.most_choices):
        offered = [list(row[number]) if number < len(row) else [] for row in choices]
        tokens = torch.zeros(len(choices), room + 1, dtype=torch.int64)
        real = torch.zeros(len(choices), room + 1, dtype=torch.bool)
        for row, ids in enumerate(offered):
            tokens[row, : len(ids)], real[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64), True
        later = torch.log_softmax(reading.go_on(tokens[:, :-1], real[:, :-1]).double(), -1)
        # chosen where they are: a vocabulary of them for each token is much to copy
        each = torch.cat((first[:, None], later), 1).gather(2, tokens.to(first.device)[..., None])
        each = each[..., 0].cpu()
        scores[:, number] = (each * real).sum(1)
        lengths[:, number] = real.sum(1)
    return scores, lengths
