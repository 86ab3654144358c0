"""Cost of the pipeline step: Forge beside a bare torch schedule over the same two stages, in turn.

Both sides run in the same two processes, a step each, in alternating order, so that a ratio holds while the
speed of the machine drifts. The bare side has the model's own parts, the same micro-batches, loss, norm, clip
and AdamW, and nothing else: no data, no counts, no guard.

usage: python benchmarks/pp.py [--json] [--check] [--pairs N] [--only gpipe|1f1b]
"""

from __future__ import annotations

from _common import Goal, Report, arguments, interval
from _pp_worker import turns

from forge_core.testing import WorkerPool

GOALS = {name: Goal(f"step, {name}, two ranks", 1.05) for name in ("gpipe", "1f1b")}
PAIRS, WIDTH = 30, 256


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=sorted(GOALS), action="append", help="measure just this")
    options = parser.parse_args()
    report = Report("pp", ["case", "bare", "forge / bare", "95 %", "goal"])
    with WorkerPool(2, timeout=500) as pool:
        for name, goal in GOALS.items():
            if options.only and name not in options.only:
                continue
            ranks = pool.run(turns, name, options.pairs or PAIRS, WIDTH)
            # a step is as long as its slowest rank
            pairs = [[max(side) for side in zip(*pair, strict=True)] for pair in zip(*ranks, strict=True)]
            bare = sorted(seconds for _, seconds in pairs)[len(pairs) // 2]
            report.ratio(name, goal, interval([forge / other for forge, other in pairs]), bare_seconds=bare)
    report.finish(options)


if __name__ == "__main__":
    main()
