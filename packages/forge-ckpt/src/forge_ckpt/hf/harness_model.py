"""A model of ours as lm-evaluation-harness sees it. Imports the harness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from forge_core.config.tables import ModelConfig
from forge_core.errors import ForgeError
from forge_core.model.dimensions import Dimensions
from forge_core.model.generate import generate

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

Request = tuple[Any, list[int], list[int]]
"""A key for the harness's cache, the context's ids, and those of what is scored."""


class ForgeLM(TemplateLM):  # type: ignore[misc]
    """Scores and continues text with a session's model.

    Args:
        session: its model is in memory, its data has a tokenizer.
        batch_size: requests that run together.
    """

    def __init__(self, session: TrainingSession, batch_size: int = 8) -> None:
        super().__init__()
        self.session, self.batch_size = session, batch_size
        self.model: Any = session.model
        self.text = session.data.tokenizer
        self.max_length = Dimensions.of(session.config[ModelConfig]).max_seq_len
        self.max_gen_toks = min(256, self.max_length // 2)

    @property
    def eot_token_id(self) -> int:
        return int(self.text.eos_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text; nothing is added."""
        ids: list[int] = self.text.encode(string)
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities of what is scored, and whether it is what greedy decoding gives."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            for i, answer in zip(chosen, self._score([requests[i] for i in chosen]), strict=True):
                found[i] = answer
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
        return found

    @torch.no_grad()
    def _score(self, requests: Sequence[Request]) -> Iterator[tuple[float, bool]]:
        """One batch, padded on the right, where causal attention does not look."""
        longest = max(len(scored) for _, _, scored in requests)
        if longest > self.max_length:
            what = f"{longest} tokens to score are more than model.max_seq_len = {self.max_length}"
            raise ForgeError(what, "raise model.max_seq_len")
        rows = [(context + scored)[-(self.max_length + 1) :] for _, context, scored in requests]
        longest = max(max(len(row) - 1 for row in rows), 1)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
        hidden = self.model(tokens.to(self.session.device))
        for i, (row, (_, _, scored)) in enumerate(zip(rows, requests, strict=True)):
            count = len(scored)
            targets = torch.tensor(row[len(row) - count :], device=hidden.device)
            logits = self.model.logits(hidden[i, len(row) - 1 - count : len(row) - 1]).float()
            chosen = logits.log_softmax(-1).gather(1, targets[:, None])
            yield float(chosen.sum()), bool((logits.argmax(-1) == targets).all())

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows where they are longer than the model's."""
        totals = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(score for score, _ in self._loglikelihood_tokens(parts))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            totals.append(total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Text up to one of the stop strings of each request."""
        texts = []
        for context, options in (request.args for request in requests):
            until = options.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            most = min(int(options.get("max_gen_toks", self.max_gen_toks)), self.max_length - 1)
            ids = (self.tok_encode(context) or [self.eot_token_id])[-(self.max_length - most) :]
            sampled = options.get("do_sample", False)
            [row] = generate(
                self.model,
                [ids],
                max_new_tokens=most,
                temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
                eos_id=self.eot_token_id,
            )
            text = self.text.decode([token for token in row if token != self.eot_token_id])
            cuts = [text.find(stop) for stop in stops if stop and stop in text]
            text = text[: min(cuts)] if cuts else text
            self.cache_hook.add_partial("generate_until", (context, options), text)
            texts.append(text)
        return texts
