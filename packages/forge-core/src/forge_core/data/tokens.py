"""The source of prepared tokens: mapped files, of which only what a batch needs is read."""

from __future__ import annotations

import hashlib

from forge_core.data.holdout import split_shards
from forge_core.data.options import TokensOptions
from forge_core.data.pack import pack_row
from forge_core.data.packing import RowSource
from forge_core.data.row import TokenRow
from forge_core.data.source import SourceSpec
from forge_core.data.token_corpus import TokenCorpus, open_corpus
from forge_core.data.tokenizer import fingerprint_of
from forge_core.errors import DataError


def build(spec: SourceSpec, options: TokensOptions) -> RowSource:
    """One split of a corpus of tokens. Documents are those of the index beside a file, else they end with
    `options.eos_id`. See `split_shards` for what is held out.

    Raises:
        DataError: no path, shards that cannot be used, ids beyond the vocabulary, prepared with another
            tokenizer, or too few tokens for one sequence.
    """
    if spec.path is None:
        raise DataError(
            "data.path: the source 'tokens' needs the path of a .npy or .bin file or of a folder",
            "forge data prepare SOURCE --out FOLDER makes one from text",
        )
    corpus = open_corpus(spec.path, options.dtype)
    if options.check_tokenizer:
        _check_tokenizer(corpus, spec)
    row = corpus_row(corpus, spec, options.eos_id)
    return pack_row(row, spec, f"{spec.name} ({spec.path})")


def corpus_row(corpus: TokenCorpus, spec: SourceSpec, eos_id: int | None = None) -> TokenRow:
    """The tokens of one split, checked against the vocabulary.

    Raises:
        DataError: ids beyond the vocabulary, or nothing is held out.
    """
    largest = corpus.check_vocabulary(spec.vocab_size, spec.cache_dir)
    end = spec.tokenizer.eos_id
    if corpus.manifest is not None:
        end = int(corpus.manifest.plan["eos_id"])
    if eos_id is not None:
        end = eos_id
    train, held = split_shards(corpus.shards, 0.0 if spec.split == "all" else spec.holdout, end)
    segments = held if spec.split == "holdout" else train
    if not segments:
        raise DataError(
            f"{spec.name}: {spec.path} leaves nothing for the split {spec.split}",
            "give more data, or change data.holdout",
        )
    cut = hashlib.blake2b(repr(segments).encode(), digest_size=8).hexdigest()
    identity = f"{corpus.identity()}/{cut}"
    return TokenRow(corpus.shards, segments, end=end, identity=identity, max_token=largest)


def _check_tokenizer(corpus: TokenCorpus, spec: SourceSpec) -> None:
    if corpus.manifest is None:
        return
    plan = corpus.manifest.plan
    if plan["tokenizer_fingerprint"] != fingerprint_of(spec.tokenizer):
        raise DataError(
            f"{spec.path} was prepared with the tokenizer {plan['tokenizer']}, data.tokenizer is another: "
            f"{spec.tokenizer.name}",
            "set data.tokenizer to that one, or data.tokens.check_tokenizer = false",
        )
