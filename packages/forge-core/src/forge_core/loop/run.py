"""One run from configuration to exit status."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch

from forge_core.config.config import Config
from forge_core.config.tables import EvalConfig, TrainConfig
from forge_core.data.journal import note_start
from forge_core.data.wording import counted
from forge_core.distributed.failure import (
    GRACE,
    Failure,
    PeerError,
    end_after,
    explain_lost_contact,
)
from forge_core.errors import ConfigError, ForgeError, Problem
from forge_core.launch.worker import is_consequence, tell_folder
from forge_core.loop.build import build_session, new_session
from forge_core.loop.device import keep_freed_memory
from forge_core.loop.evaluate import evaluating
from forge_core.loop.loop import run_training_loop
from forge_core.loop.seeds import derive_seed
from forge_core.metrics.numbers import short
from forge_core.plugins import Plugins, blame_frames

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

REQUEUE = 75
NO_CHECKPOINTS = (
    "no plugin of this run keeps checkpoints: the weights are gone when it ends "
    "(the table of a plugin that does keeps them; forge plugins lists what is installed)"
)


def train(config: Config, plugins: Plugins) -> int:
    """Train as the configuration says and return the exit status.

    The run folder gets the resolved configuration, the plugins, metrics and at the end `exit.json`. What goes
    wrong is raised, after `exit.json` has been written.
    """
    with ExitStack() as stack:
        session = new_session(config, plugins, stack)
        stack.enter_context(session.stop)
        _refuse_taken_folder(session)
        _refuse_folder_in_use(session)
        if session.device.type == "cpu":
            keep_freed_memory()
        try:
            if session.watch is not None:
                session.watch.last_words = partial(_last_words, session)
            build_session(session)
            session.metrics.listen()
            start = _prepare(session)
            session.metrics.start(start)
            _announce(session)
            run_training_loop(session, step=start, tokens_seen=session.tokens_seen)
            status, reason = _outcome(session)
            if status == 0:
                _show_sample(session)
            session.metrics.notice(f"{reason}; see {session.run.path}")
            _part(session)
        except BaseException as error:
            blame_frames(error, session.plugins.loaded.values())
            session.emit("exception", error)
            told = _tell(session, error)
            if told is not error:
                raise told from error
            raise
        finally:
            if hasattr(session, "metrics"):
                session.metrics.close()
        if session.ranks.is_main:
            _write_exit(session, status, reason)
        return status


def _refuse_taken_folder(session: TrainingSession) -> None:
    keeps = any(i.plugin != "core" for i in session.plugins.implementations("forge_build_checkpointer"))
    taken = session.run.holds_a_run and not keeps
    if session.control is not None:  # rank 0 looks, before it makes the folder
        taken = bool(session.control.same("taken" if taken else ""))
    if taken:
        message = f"{session.run.path} already holds a run, and nothing here can go on with it"
        hint = "choose another name, remove the folder, or add the table of a plugin that keeps checkpoints"
        raise ConfigError([Problem("run.name", message, hint)])


def _refuse_folder_in_use(session: TrainingSession) -> None:
    """Claim the folder of an earlier start, before anything in it is touched."""
    problem = ""
    try:
        _claim(session)
    except ConfigError as error:
        problem = error.message
        if session.control is None:
            raise
    if session.control is not None:
        problem, ours = json.loads(session.control.same(json.dumps([problem, session.run.ours])))
        session.run = attrs.evolve(session.run, ours=ours)
    if problem:
        raise ConfigError([Problem("", problem)])


def _prepare(session: TrainingSession) -> int:
    """Restore what there is to go on from, and write down what is about to run; the step to start after."""
    start = 0
    _claim(session)  # of a run that began since this one looked, before its saves seem to be dead
    if session.checkpointer is not None:
        session.exit_stack.callback(session.checkpointer.close)
        start = session.checkpointer.load(session)
    if session.ranks.is_main:
        session.run.create()
        _claim(session)
        _write_description(session)
        note_start(session, start)
    if session.control is not None:
        session.control.same("")  # the others go on once the folder is there
        session.run = attrs.evolve(session.run, ours=True)
    return start


def _claim(session: TrainingSession) -> None:
    """Claim the folder, on rank 0 and once it is there.

    Raises:
        ConfigError: another run has it.
    """
    if session.ranks.is_main and not session.run.ours and session.run.path.is_dir():
        session.exit_stack.enter_context(session.run.claim())
        session.run = attrs.evolve(session.run, ours=True)


def _write_description(session: TrainingSession) -> None:
    tell_folder(session.run.path)
    (session.run.path / "exit.json").unlink(missing_ok=True)  # that of an earlier start
    session.run.write_text("config.toml", session.config.to_toml())
    session.run.write_json(
        "plugins.json",
        {
            "fingerprint": session.plan.fingerprint,
            "plugins": {p.name: p.version for p in session.plugins.loaded.values()},
            "plan": [{"hook": e.hook, "plugin": e.plugin, "what": e.what} for e in session.plan.entries],
        },
    )


def _outcome(session: TrainingSession) -> tuple[int, str]:
    number = session.stop.number
    if number is None:
        return 0, f"done after {counted(session.step, 'step')}"
    name = signal.Signals(number).name
    if session.checkpointer is not None and session.saved_step == session.step:
        return REQUEUE, f"stopped by {name} after step {session.step}, checkpoint saved"
    return 128 + number, f"stopped by {name} after step {session.step}, nothing saved"


def _write_exit(
    session: TrainingSession, status: int, reason: str, rank: int | None = None, hint: str = ""
) -> None:
    if session.run.ours and session.run.path.is_dir():
        found: dict[str, Any] = {"status": status, "reason": reason, "step": session.step}
        found |= {"hint": hint} if hint else {}
        session.run.write_json("exit.json", found if rank is None else {**found, "rank": rank})


def _write_failure(session: TrainingSession, status: int, reason: str, rank: int | None, hint: str) -> None:
    """Write down what ended the run, where that is possible: on a full disk its own error says more, and its
    status is the run's."""
    with suppress(ForgeError):
        _write_exit(session, status, reason, rank, hint)


def _tell(session: TrainingSession, error: BaseException) -> BaseException:
    """Write down and tell the other ranks what ended the run; the error to raise on this one.

    No collective work: other ranks may be anywhere. What breaks because a peer has failed gives way to the
    peer's error.
    """
    status = error.exit_status if isinstance(error, ForgeError) else 1
    watch, rank = session.watch, session.ranks.rank
    if watch is None:
        several = session.control is not None
        _write_failure(session, status, _reason(error), rank if several else None, _hint(error))
        return error
    if is_consequence(error):
        failure = watch.failure(wait=GRACE)
        if failure is None:
            error = explain_lost_contact(error, watch, session.step)
            failure = watch.failure()
        if failure is not None:
            _last_words(session, failure)
            watch.stop()
            return PeerError(failure)
    failure = Failure(rank=rank, step=session.step, status=status, text=_reason(error))
    if watch.report(failure):
        _write_failure(session, status, _reason(error), rank, _hint(error))
    end_after(status)
    return error


def _last_words(session: TrainingSession, failure: Failure) -> None:
    """Of a rank that ends for a peer's failure: the peer's error, unless it has been written, and no open
    file."""
    if not (session.run.path / "exit.json").exists():
        _write_failure(session, failure.status, failure.text, failure.rank, "")
    if hasattr(session, "metrics"):
        session.metrics.close()


def _part(session: TrainingSession) -> None:
    """Wait for the other ranks to be done as well, and look after them no longer. Only after success."""
    if session.control is not None:
        session.control.check_stop()
    if session.watch is not None:
        session.watch.stop()
        session.exit_stack.callback(session.processes.leave)


def _reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    text = error.message if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join([*lines, *getattr(error, "__notes__", ())])


def _hint(error: BaseException) -> str:
    return error.hint if isinstance(error, ForgeError) else ""


def _show_sample(session: TrainingSession) -> None:
    """Print what the model makes now, where `[eval] sample_tokens` asks for it."""
    if session.config[EvalConfig].sample_tokens and session.generator is not None:
        with evaluating(session):
            # every rank takes part, and has to draw the same tokens
            torch.manual_seed(derive_seed(session.config[TrainConfig].seed, "sample"))
            try:
                text = session.generator.sample(session)
            except ForgeError as error:  # of a run that is done, and whose checkpoints are saved
                text = f"no sample: {error.message}"
        session.metrics.notice(text)


def _announce(session: TrainingSession) -> None:
    """What is about to run, in a few lines."""
    train = session.config[TrainConfig]
    held = sum(p.numel() for p in session.model.parameters())
    size = short(getattr(session.model, "whole_size", held))  # this rank may have a part of the model
    tokens = short(train.batch_size * session.grad_accum_steps * session.ranks.data_size * train.seq_len)
    updates = counted(train.max_steps, "update")
    precision = str(session.compute_dtype).removeprefix("torch.")
    session.metrics.notice(
        f"{size} parameters on {session.device} in {precision}; {updates} of {tokens} "
        f"tokens; run folder {session.run.path}"
    )
    if session.checkpointer is None:
        session.metrics.notice(NO_CHECKPOINTS)
