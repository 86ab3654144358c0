"""Generation with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.config.tables import EvalConfig, ModelConfig, TrainConfig
from forge_core.errors import UsageError
from forge_core.loop.seeds import derive_seed
from forge_core.model.dimensions import Dimensions
from forge_core.model.sampling import Sampler

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession
    from forge_core.model.decoder import Decoder

SAMPLE_PROMPT = 64
"""Tokens of held-out text that a sample goes on from."""

SAMPLE_TEMPERATURE = 0.8


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
    prefill_chunk: int | None = None,
) -> list[list[int]]:
    """Continue every prompt. Greedily, a row gets what it would get alone, whatever else is in the batch.

    Args:
        model: a decoder; its training mode is put back at the end, also after an error.
        prompts: token ids, one list a row; lengths may differ, none is empty.
        max_new_tokens: most tokens added to a row.
        temperature, top_k, top_p, generator: see `Sampler`.
        eos_id: a row ends with this token; generation ends when all rows have.
        prefill_chunk: run prompts in pieces of this many tokens, to save memory; None: at once.

    Returns:
        The new tokens of each row, its EOS included and nothing after it.

    Raises:
        UsageError: an argument out of range, an empty prompt, an unknown id, or more tokens than
        `max_seq_len`.
    """
    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    if prefill_chunk is not None and prefill_chunk < 1:
        raise UsageError(f"prefill_chunk = {prefill_chunk} is not at least 1")
    _check(model, prompts, max_new_tokens)
    if not prompts:
        return []
    device = next(model.parameters()).device
    with evaluating(model):
        columns = list(_columns(model, prompts, max_new_tokens, sampler, eos_id, prefill_chunk, device))
    rows: list[list[int]] = torch.stack(columns, 1).tolist()
    return [row[: row.index(eos_id) + 1] if eos_id in row else row for row in rows]


def _check(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    d = Dimensions.of(model.config)
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens = {max_new_tokens} is not at least 1")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(
                f"prompt {row} is empty", "start from at least one token, such as the end of a document"
            )
        if not 0 <= min(prompt) <= max(prompt) < d.vocab_size:
            raise UsageError(f"prompt {row} holds an id outside the vocabulary of {d.vocab_size}")
        if len(prompt) + max_new_tokens > d.max_seq_len:
            room = d.max_seq_len - len(prompt)
            ask = f"ask for at most {room} (--max-new-tokens)" if room > 0 else "shorten the prompt"
            tokens = f"{len(prompt)} token{'s' * (len(prompt) > 1)}"
            raise UsageError(
                f"prompt {row} of {tokens} and {max_new_tokens} new ones exceed "
                f"model.max_seq_len = {d.max_seq_len}",
                f"{ask}, or raise model.max_seq_len",
            )


def _columns(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampler: Sampler,
    eos_id: int | None,
    prefill_chunk: int | None,
    device: torch.device,
) -> Iterator[Tensor]:
    """The next token of every row, (B,) int64, again and again until all rows have ended."""
    tokens, valid = _left_padded(prompts, device)
    padding = (~valid).sum(1, keepdim=True)
    width = tokens.shape[1]
    ragged = valid if len({len(prompt) for prompt in prompts}) > 1 else None
    cache = model.new_cache(len(prompts), width + max_new_tokens)
    index = torch.arange(width + max_new_tokens, device=device)[None]
    step = prefill_chunk or width
    hidden = tokens  # bound below: a prompt has at least one token
    for start in range(0, width, step):
        piece = slice(start, min(start + step, width))
        positions = None if ragged is None else (index[:, piece] - padding).clamp(min=0)
        mask = None if ragged is None else ragged[:, piece]
        hidden = model(tokens[:, piece], positions=positions, valid=mask, cache=cache)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for end in range(width, width + max_new_tokens):
        new = sampler(model.logits(hidden[:, -1]))
        if eos_id is not None:
            ended = ended | (new == eos_id)
        yield new
        if end + 1 == width + max_new_tokens or (eos_id is not None and bool(ended.all())):
            return
        positions = None if ragged is None else index[:, end : end + 1] - padding
        hidden = model(new[:, None], positions=positions, cache=cache)


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (B, longest) int64 that end in one column, and which are real (B, longest) bool."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    real = torch.tensor([[False] * (longest - len(p)) + [True] * len(p) for p in prompts], device=device)
    return tokens, real


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is in the mode it was in, and sharded again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with as_written(model):
            yield
    finally:
        for module in model.modules():
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:  # of FSDP2: whole weights would outlive the next update
                reshard()
        for module in training:
            module.training = True


def as_written(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside, compiled blocks run uncompiled: every length of a growing text would compile them again."""
    kinds = ("_compiled_call_impl", "forge_compiled")
    if not any(getattr(module, kind, None) for module in model.modules() for kind in kinds):
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class DecoderGenerator:
    """The text family's `Generator`: prompts are strings."""

    def generate(
        self, session: TrainingSession, prompts: Sequence[Any], *, max_new_tokens: int, **sampling: Any
    ) -> list[str]:
        """Continue each prompt with the session's model and tokenizer.

        On several ranks all call it with the same prompts, and get the same text.

        Args:
            prompts: strings; an empty one starts a new document. See `Generator`.
            max_new_tokens: most tokens added.
            sampling: see `generate`; `eos_id` is the tokenizer's unless given.

        Returns:
            The text that follows each prompt, without the end of the document.
        """
        if session.control is not None and sampling.get("generator") is None:
            sampling["generator"] = _shared_generator(session)
        tokenizer = session.data.tokenizer
        eos_id = sampling.setdefault("eos_id", tokenizer.eos_id)
        model: Any = session.model
        ids = [tokenizer.encode(text_of(prompt)) or [tokenizer.eos_id] for prompt in prompts]
        rows = generate(model, ids, max_new_tokens=max_new_tokens, **sampling)
        return [tokenizer.decode(row[:-1] if row[-1] == eos_id else row) for row in rows]

    def sample(self, session: TrainingSession) -> str:
        """Continue `eval.sample_prompt`, or the start of a held-out document."""
        config = session.config[EvalConfig]
        length = config.sample_tokens or 0
        room = (session.config[ModelConfig].max_seq_len or SAMPLE_PROMPT) - length
        prompt = config.sample_prompt or _held_out_start(session, min(SAMPLE_PROMPT, room))
        if session.control is not None:
            prompt = session.control.same(prompt)
        seed = derive_seed(session.config[TrainConfig].seed, "sample", session.step)
        [text] = self.generate(
            session,
            [prompt],
            max_new_tokens=length,
            temperature=SAMPLE_TEMPERATURE,
            generator=torch.Generator(session.device).manual_seed(seed),  # one text, however a run is split
        )
        return f"--- sample: after {prompt!r} the model writes\n{text}\n---"


def text_of(prompt: Any) -> str:
    """The text of a prompt.

    Raises:
        UsageError: there is more than text to it.
    """
    if isinstance(prompt, str):
        return prompt
    more = [name for name in prompt if name != "prompt"]
    if more:
        raise UsageError(f"a prompt has {', '.join(more)}, and this model takes text alone")
    text: str = prompt["prompt"]
    return text


def _shared_generator(session: TrainingSession) -> torch.Generator:
    """Random numbers that are the same on all ranks, which must end a text at the same token."""
    assert session.control is not None
    seed = session.control.same(str(int(torch.randint(1 << 62, ()))))
    return torch.Generator(session.device).manual_seed(int(seed))


def _held_out_start(session: TrainingSession, length: int) -> str:
    """The first `length` tokens of held-out text, a line end where nothing is held out."""
    for dataset in session.data.evaluation:
        for batch in dataset:
            text: str = session.data.tokenizer.decode(batch["tokens"][0, :length].tolist())
            return text
    return "\n"
