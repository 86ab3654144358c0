"""Cost of the data side: packed sequences from mapped tokens beside plain slicing, room that best-fit leaves
over, and what it takes to shuffle a billion samples and to go on in the middle of them.

Two corpora: the sources of Python's standard library, one document a file (17,000 tokens on average), and
the same cut at double blank lines (`short`, 1,000 tokens). `packed` reads, lays out and masks the same
windows that plain slicing reads: for each a slice of the mapped file and the slice one further, converted and
stacked, which is all that a minimal training loop does. `lean` (without a goal) is the least that tokens and
targets can cost: slices of a view, copied into place. All of it runs as a training run on a CPU does, which
has malloc keep freed memory.

usage: python benchmarks/data.py [--json] [--check] [--pairs N] [--only packed|padding|billion]
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from _common import Goal, Report, arguments, paired
from numpy.typing import NDArray

from forge_core.data.best_fit import BestFitTokens
from forge_core.data.corpus import find_documents
from forge_core.data.options import TokensOptions
from forge_core.data.packing import RowSource
from forge_core.data.prepare.job import Job
from forge_core.data.prepare.run import prepare
from forge_core.data.source import Packing, SourceSpec
from forge_core.data.tokenizer import ByteTokenizer
from forge_core.data.tokens import build

SLOWEST = 1 / 0.8
SHAPES = [(8, 2048), (32, 1024), (4, 8192)]
"""Sequences of a batch, tokens of a sequence."""
BATCHES = 32
"""Batches of a turn, each of other windows."""
BILLION = 10**9
LENGTHS = (1024, 2048, 8192)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=list(PARTS), help="run one part")
    options = parser.parse_args()
    from forge_core.loop.device import keep_freed_memory  # imports torch, which the children need not

    keep_freed_memory()
    report = Report("data", ["case", "tokens/s", "value", "interval", "goal"])
    with prepared() as folder:
        for name, part in PARTS.items():
            if options.only in (None, name):
                part(report, folder, options.pairs or 30)
    report.finish(options)


@contextmanager
def prepared() -> Iterator[Path]:
    """Folders `long` and `short` of 12 million tokens each, a token a byte."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(["stdlib"], Job(kind="text"), folder / "long", shard_size=1 << 30)
        texts = [document.read().decode("utf-8", "replace") for document in find_documents(None, ["*"])]
        with (folder / "short.jsonl").open("w") as file:
            file.writelines(
                json.dumps({"text": part}) + "\n" for text in texts for part in text.split("\n\n\n") if part
            )
        prepare([str(folder / "short.jsonl")], Job(kind="jsonl"), folder / "short", shard_size=1 << 30)
        yield folder


def source_of(
    folder: Path, length: int, *, packing: Packing = "concatenate", apart: bool = True
) -> RowSource:
    """The corpus in sequences of `length`."""
    spec = SourceSpec(
        name="tokens",
        path=str(folder),
        split="all",
        seq_len=length,
        tokenizer=ByteTokenizer(),
        vocab_size=257,
        pack=apart,
        holdout=0.0,
        seed=0,
        packing=packing,
    )
    return build(spec, TokensOptions())


def turn(read: Callable[[NDArray[np.int64]], object], indices: NDArray[np.int64]) -> Callable[[], None]:
    """Read a batch for each row of `indices`, over and over."""

    def run() -> None:
        for row in indices:
            read(row)

    return run


def packed(report: Report, folder: Path, pairs: int) -> None:
    """Packed sequences over plain slices of the same windows."""
    file = folder / "long" / "tokens-00000.npy"
    for rows, length in SHAPES:
        mapped = np.load(file, mmap_mode="r")
        view = mapped.view(np.ndarray)
        whole = (len(mapped) - 1) // length
        indices = np.random.default_rng(0).integers(0, whole, (BATCHES, rows))

        def plain(
            numbers: NDArray[np.int64], length: int = length, mapped: NDArray[np.uint16] = mapped
        ) -> object:
            starts = (numbers * length).tolist()
            tokens = np.stack([mapped[at : at + length].astype(np.int64) for at in starts])
            targets = np.stack([mapped[at + 1 : at + 1 + length].astype(np.int64) for at in starts])
            return tokens, targets

        def lean(numbers: NDArray[np.int64], length: int = length, view: NDArray[np.uint16] = view) -> object:
            tokens = np.empty((len(numbers), length), dtype=np.int64)
            targets = np.empty_like(tokens)
            for row, at in enumerate((numbers * length).tolist()):
                tokens[row] = view[at : at + length]
                targets[row] = view[at + 1 : at + 1 + length]
            return tokens, targets

        documents, short = source_of(folder / "long", length), source_of(folder / "short", length)
        one_text = source_of(folder / "long", length, apart=False)
        fitted = source_of(folder / "long", length, packing="best_fit")
        same_share = indices * (len(fitted) - 1) // whole
        goal = Goal("packed over plain slicing", SLOWEST)
        shape = f"{rows} x {length}"
        count = indices.size * length
        for case, first, second, limit in (
            (f"packed, documents apart, {shape}", plain, turn(documents.batch, indices), goal),
            (f"packed, short documents apart, {shape}", plain, turn(short.batch, indices), None),
            (f"packed, one text, {shape}", plain, turn(one_text.batch, indices), goal),
            (f"packed, best fit, {shape}", plain, turn(fitted.batch, same_share), None),
            (f"lean, documents apart, {shape}", lean, turn(documents.batch, indices), None),
        ):
            found = paired(turn(first, indices), second, pairs)
            report.ratio(case, limit, found.ratio(), tokens=count / float(np.median(found.second)))


def padding(report: Report, folder: Path, pairs: int) -> None:
    """Share of positions that best fit leaves empty."""
    goal = Goal("share of positions", 0.01)
    for corpus in ("long", "short"):
        for length in LENGTHS:
            source = source_of(folder / corpus, length, packing="best_fit")
            assert isinstance(source, BestFitTokens)
            report.value(f"padding, {corpus} documents, {length}", goal, source.padding, tokens=0.0)


def billion(report: Report, folder: Path, pairs: int) -> None:
    """Fresh processes: the first batch of a shuffle, and the first batch from the middle of a run."""
    for case in ("shuffle", "resume"):
        code = f"import data; data.{case}({str(folder)!r})"
        here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        command = [sys.executable, "-c", code]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env=here)
        found = json.loads(told.stdout.splitlines()[-1])
        report.value(f"{case} of 1e9, first batch, s", Goal("seconds", 1.0), found["seconds"], tokens=0.0)
        if "bytes" in found:
            report.value(f"{case} of 1e9, peak, MB", Goal("MB", 100.0), found["bytes"] / 1e6, tokens=0.0)


def shuffle(folder: str) -> None:
    """Time to the first numbers of a shuffle and to some in its middle and at its end, and the most memory
    that the process held, with Python and numpy."""
    from forge_core.data.order import ShuffledOrder

    began = time.perf_counter()
    order = ShuffledOrder(BILLION, 0)
    for position in (0, BILLION // 2, BILLION - 4096):
        order.at(position, 4096)
    print(json.dumps({"seconds": time.perf_counter() - began, "bytes": held()}))


def resume(folder: str) -> None:
    """Time from opening the data to the first batch behind a billion samples."""
    from forge_core.data.order import ShuffledOrder
    from forge_core.data.stream import SampleStream

    began = time.perf_counter()
    source = source_of(Path(folder) / "long", 2048)
    stream = SampleStream([source], ShuffledOrder(len(source), 0), batch_size=8)
    state = stream.state_dict()
    stream.load_state_dict({**state, "position": BILLION})
    stream.take(1)
    print(json.dumps({"seconds": time.perf_counter() - began}))


def held() -> int:
    """Most bytes that this process ever held. Linux tells of a child's ru_maxrss what its parent held."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


PARTS = {"packed": packed, "padding": padding, "billion": billion}

if __name__ == "__main__":
    main()
