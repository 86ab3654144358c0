"""Tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) on a model of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forge_core.errors import ForgeError

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


def evaluate_tasks(
    session: TrainingSession, tasks: Sequence[Any], *, limit: int | None = None, batch_size: int = 8
) -> dict[str, float]:
    """Metrics by `task/metric`.

    Args:
        session: see `forge_ckpt.hf.using`.
        tasks: names, or task objects of the harness. limit: most samples of each.
        batch_size: requests that run together.

    Raises:
        ForgeError: the harness is not installed, or a task has no such name.
    """
    model = harness_model(session, batch_size)
    try:
        from lm_eval import simple_evaluate

        found = simple_evaluate(model=model, tasks=list(tasks), limit=limit, log_samples=False)
    except ImportError as error:
        raise _missing(error) from error
    except (KeyError, ValueError) as error:
        raise ForgeError(f"lm-evaluation-harness: {error}", "see lm-eval ls tasks") from error
    metrics: dict[str, float] = {}
    for task, results in (found or {}).get("results", {}).items():
        for name, value in results.items():
            if isinstance(value, int | float):
                metrics[f"{task}/{name.removesuffix(',none')}"] = float(value)
    return metrics


def harness_model(session: TrainingSession, batch_size: int = 8) -> Any:
    """The model as the harness takes it, `lm_eval.simple_evaluate(model=...)`.

    Raises:
        ForgeError: the harness is not installed.
    """
    try:
        from forge_ckpt.hf.harness_model import ForgeLM
    except ImportError as error:
        raise _missing(error) from error
    return ForgeLM(session, batch_size)


def _missing(error: ImportError) -> ForgeError:
    return ForgeError(f"tasks need lm-evaluation-harness: {error}", 'pip install "forge-ckpt[lm-eval]"')
