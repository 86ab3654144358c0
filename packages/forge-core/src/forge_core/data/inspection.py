"""What is in a source: counts, lengths of documents, vocabulary, and samples as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_core.data.best_fit import BestFitTokens
from forge_core.data.draws import draws, first_epoch
from forge_core.data.packing import RowSource
from forge_core.data.row import TokenRow
from forge_core.data.source import SequentialSource
from forge_core.data.tokenizer import Tokenizer
from forge_core.loss.shift import IGNORE

PERCENTILES = (1, 10, 50, 90, 99)
MOST_COUNTED = 1 << 26
"""Tokens that the vocabulary is counted over; of a larger corpus, this many spread over it."""
STRETCH = 1 << 16


@attrs.frozen(kw_only=True)
class Contents:
    """What a source tells of itself, where its samples are no row of tokens; see `contents_of`.

    Attributes:
        lengths: (n,) tokens of each document, at least one.
        padding: share of positions that hold nothing.
        counts: numbers of further things by what they are, such as "documents cut".
    """

    lengths: NDArray[np.int64]
    padding: float
    counts: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Lengths:
    """Tokens of documents.

    Attributes:
        documents: how many. mean, largest: tokens.
        percentiles: tokens by percent.
        histogram: (from, below, documents) in powers of two, without empty ends.
    """

    documents: int
    mean: float
    largest: int
    percentiles: dict[int, int]
    histogram: list[tuple[int, int, int]]


@attrs.frozen(kw_only=True)
class Coverage:
    """How much of a vocabulary occurs: distinct ids among `counted` tokens, the largest, and the share of
    tokens that are supervised."""

    vocab_size: int
    distinct: int
    largest: int
    counted: int
    supervised: float


@attrs.frozen(kw_only=True)
class Run:
    """Tokens of a sample that stand together: of one document, all targets or all none.

    Attributes:
        document: number in the sample; None for padding.
        learnt: whether these tokens are targets. text: decoded, nothing of padding.
    """

    document: int | None
    learnt: bool
    tokens: int
    text: str


def document_lengths(row: TokenRow) -> Lengths:
    """Of all documents of a row."""
    return lengths_of(row.documents()[1])


def lengths_of(lengths: NDArray[np.int64]) -> Lengths:
    """Of documents of so many tokens, at least one."""
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(powers)
    first = int(powers.min())
    return Lengths(
        documents=len(lengths),
        mean=float(lengths.mean()),
        largest=int(lengths.max()),
        percentiles={p: int(np.percentile(lengths, p, method="lower")) for p in PERCENTILES},
        histogram=[(1 << p, 2 << p, int(counts[p])) for p in range(first, len(counts))],
    )


def coverage(row: TokenRow, vocab_size: int) -> Coverage:
    """Which ids occur; of more than `MOST_COUNTED` tokens a part that is spread over the row."""
    seen = np.zeros(max(vocab_size, row.max_token + 1), dtype=np.bool_)
    counted = supervised = 0
    starts = range(0, len(row), STRETCH)
    step = max(1, -(-len(row) // MOST_COUNTED))
    for start in starts[::step]:
        found = row.windows(np.array([start]), min(STRETCH, len(row) - start))
        seen[found.tokens] = True
        counted += found.tokens.size
        supervised += found.tokens.size if found.supervised is None else int(found.supervised.sum())
    return Coverage(
        vocab_size=vocab_size,
        distinct=int(seen.sum()),
        largest=int(np.flatnonzero(seen)[-1]),
        counted=counted,
        supervised=supervised / counted,
    )


def decode_sample(
    sample: Mapping[str, NDArray[Any]],
    tokenizer: Tokenizer,
    stretches: Sequence[tuple[int, int, str]] = (),
) -> list[Run]:
    """A sample, cut where a document ends, where learning begins or ends, and where padding begins.

    A token is learnt where it is the target of the position before it; the target of the last position
    comes behind the sample and is not shown.

    Args:
        stretches: what is no text, see `BatchedSource.stretches_of`; shown as what it is, also where it takes
            no position.
    """
    tokens = np.asarray(sample["tokens"])
    targets = np.asarray(sample["targets"])
    documents = np.asarray(sample.get("documents", np.zeros_like(tokens)))
    valid = np.asarray(sample.get("valid", np.ones(tokens.shape, dtype=bool)))
    learnt = np.concatenate([[False], targets[:-1] != IGNORE])
    # the first token of a document is never a target; it is shown with what follows it
    first = np.flatnonzero(np.diff(documents, prepend=documents[:1] - 1))
    following = np.minimum(first + 1, len(tokens) - 1)
    learnt[first] = learnt[following] & (documents[following] == documents[first])
    changes = [np.diff(each.astype(np.int64)) != 0 for each in (documents, learnt, valid)]
    edges = np.flatnonzero(np.logical_or.reduce(changes)) + 1
    inside = {start + k for start, count, _ in stretches for k in range(1, count)}
    ends = {at for start, count, _ in stretches for at in (start, start + count)}
    cuts = sorted(({0, len(tokens), *edges.tolist()} | ends) - inside)
    runs = []
    for a, b in pairwise(cuts):
        document = int(documents[a]) if valid[a] else None
        here = [(count, what) for start, count, what in stretches if start == a]
        runs += [Run(document=document, learnt=False, tokens=count, text=what) for count, what in here]
        if not any(count for count, _ in here):
            text = tokenizer.decode(tokens[a:b].tolist()) if valid[a] else ""
            runs.append(Run(document=document, learnt=bool(learnt[a]), tokens=b - a, text=text))
    return runs


def some_samples(
    source: Any, count: int, name: str = "", seed: int = 0
) -> Iterator[tuple[int, Mapping[str, NDArray[Any]]]]:
    """Number and arrays of samples that are spread over a source; of a stream the first ones.

    Args:
        name, seed: what a source draws that draws comes from them.
    """
    if isinstance(source, SequentialSource):
        yield from enumerate(islice(source.once(), count))
        return
    size = len(source)
    chosen = np.linspace(0, size - 1, min(count, size)).astype(np.int64)
    read = first_epoch(source, chosen, name, seed)
    for number in chosen.tolist():
        yield number, read.sample(number, 0) if draws(source) else read[number]


def stretches_of(
    source: Any, sample: Mapping[str, NDArray[Any]], number: int
) -> Sequence[tuple[int, int, str]]:
    """What of a sample is no text, where the source tells."""
    tell = getattr(source, "stretches_of", None)
    return () if tell is None else tell(sample, number)


def contents_of(source: Any) -> Contents | None:
    """What a source without a row of tokens tells in its method `contents()`; None: it has none."""
    tell = getattr(source, "contents", None)
    return None if tell is None else tell()


def padding_of(source: Any) -> float | None:
    """Share of positions that hold nothing; None where the source does not tell."""
    return source.padding if isinstance(source, BestFitTokens) else None


def row_of(source: Any) -> TokenRow | None:
    """The tokens under a source; None where there are none (random tokens, streams, other packages')."""
    return source.row if isinstance(source, RowSource) else None
