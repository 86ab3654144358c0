"""Options of metrics. Imports no torch."""

from __future__ import annotations

from forge_core.config import key, table


@table
class RelaxedAccuracyOptions:
    """Answers with a number may be a little off."""

    tolerance: float = key(0.05, ge=0, help="How far, as a share of the right number.")


@table
class MultipleChoiceOptions:
    """Which of the choices of a sample the model finds likeliest."""

    score: str = key(
        "sum",
        choices=("sum", "mean"),
        help="What is compared: the log-probability of a whole choice, its end included, or its mean over "
        "tokens, which does not favour short ones.",
    )
