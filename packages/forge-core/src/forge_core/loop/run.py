"""One run from configuration to exit status."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

from forge_core.config.config import Config
from forge_core.config.tables import EvalConfig, TrainConfig
from forge_core.errors import ConfigError, ForgeError, Problem
from forge_core.loop.build import build_session, new_session
from forge_core.loop.device import keep_freed_memory
from forge_core.loop.evaluate import evaluating
from forge_core.loop.loop import run_training_loop
from forge_core.metrics.numbers import short
from forge_core.plugins import Plugins, blame_frames

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

REQUEUE = 75
NO_CHECKPOINTS = "no plugin of this run keeps checkpoints: the weights are gone when it ends"


def train(config: Config, plugins: Plugins) -> int:
    """Train as the configuration says and return the exit status.

    The run folder gets the resolved configuration, the plugins, metrics and at the end `exit.json`. What goes
    wrong is raised, after `exit.json` has been written.
    """
    with ExitStack() as stack:
        session = new_session(config, plugins, stack)
        stack.enter_context(session.stop)
        _refuse_taken_folder(session)
        if session.device.type == "cpu":
            keep_freed_memory()
        try:
            build_session(session)
            start = _prepare(session)
            session.metrics.start(start)
            _announce(session)
            run_training_loop(session, step=start, tokens_seen=session.tokens_seen)
            status, reason = _outcome(session)
            if status == 0:
                _show_sample(session)
            session.metrics.notice(f"{reason}; see {session.run.path}")
        except BaseException as error:
            blame_frames(error, session.plugins.loaded.values())
            session.emit("exception", error)
            _write_exit(session, error.exit_status if isinstance(error, ForgeError) else 1, _reason(error))
            raise
        finally:
            if hasattr(session, "metrics"):
                session.metrics.close()
        _write_exit(session, status, reason)
        return status


def _refuse_taken_folder(session: TrainingSession) -> None:
    keeps = any(i.plugin != "core" for i in session.plugins.implementations("forge_build_checkpointer"))
    if session.run.holds_a_run and not keeps:
        message = f"{session.run.path} already holds a run, and nothing here can go on with it"
        hint = "choose another name, remove the folder, or add the table of a plugin that keeps checkpoints"
        raise ConfigError([Problem("run.name", message, hint)])


def _prepare(session: TrainingSession) -> int:
    """Restore what there is to go on from, and write down what is about to run; the step to start after."""
    start = 0
    if session.checkpointer is not None:
        session.exit_stack.callback(session.checkpointer.close)
        start = session.checkpointer.load(session)
    session.run.create()
    session.run.write_text("config.toml", session.config.to_toml())
    session.run.write_json(
        "plugins.json",
        {
            "fingerprint": session.plan.fingerprint,
            "plugins": {p.name: p.version for p in session.plugins.loaded.values()},
            "plan": [{"hook": e.hook, "plugin": e.plugin, "what": e.what} for e in session.plan.entries],
        },
    )
    return start


def _outcome(session: TrainingSession) -> tuple[int, str]:
    number = session.stop.received
    if number is None:
        return 0, f"done after {session.step} steps"
    name = signal.Signals(number).name
    if session.checkpointer is not None and session.saved_step == session.step:
        return REQUEUE, f"stopped by {name} after step {session.step}, checkpoint saved"
    return 128 + number, f"stopped by {name} after step {session.step}, nothing saved"


def _write_exit(session: TrainingSession, status: int, reason: str) -> None:
    if session.run.path.exists():
        session.run.write_json("exit.json", {"status": status, "reason": reason, "step": session.step})


def _reason(error: BaseException) -> str:
    text = error.message if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
    return "; ".join([text, *getattr(error, "__notes__", ())])


def _show_sample(session: TrainingSession) -> None:
    """Print what the model makes now, where `[eval] sample_tokens` asks for it."""
    if session.config[EvalConfig].sample_tokens and session.generator is not None:
        with evaluating(session):
            text = session.generator.sample(session)
        session.metrics.notice(text)


def _announce(session: TrainingSession) -> None:
    """What is about to run, in a few lines."""
    train = session.config[TrainConfig]
    size = short(sum(p.numel() for p in session.model.parameters()))
    tokens = short(train.batch_size * session.grad_accum_steps * session.ranks.data_size * train.seq_len)
    precision = str(session.compute_dtype).removeprefix("torch.")
    session.metrics.notice(
        f"{size} parameters on {session.device} in {precision}; {train.max_steps} updates of {tokens} "
        f"tokens; run folder {session.run.path}"
    )
    if session.checkpointer is None:
        session.metrics.notice(NO_CHECKPOINTS)
