"""The training loop. It owns what repeats and knows no model family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_core.config.tables import DataConfig, DistributedConfig, EvalConfig, GuardConfig
from forge_core.data.wording import counted
from forge_core.errors import GuardError
from forge_core.loop.evaluate import evaluate
from forge_core.loop.incidents import write_incident
from forge_core.optim import optimizer_mode

if TYPE_CHECKING:
    from forge_core.contract import StepResult
    from forge_core.loop.session import TrainingSession


def run_training_loop(session: TrainingSession, *, step: int = 0, tokens_seen: int = 0) -> tuple[int, int]:
    """Train from after update `step` to `train.max_steps`, or until a signal.

    Returns:
        The last finished update and the tokens seen.

    Raises:
        GuardError: too many bad steps in a row, or the first one under `guard.action = "stop"`.
    """
    session.step, session.tokens_seen = step, tokens_seen
    session.emit("train_begin")
    session.check_stop()  # a signal to any rank since the start
    for named in session.optimizers.values():
        optimizer_mode(named.optimizer, "train")
    session.freeze.apply(step + 1)
    session.freeze.set_modes(session.model)
    session.metrics.recount_flops()
    if step == 0:
        _save_if_due(session, "initial")
    phases = {p.start_step: f"data phase {i}" for i, p in enumerate(session.config[DataConfig].phases, 1)}
    train = session.step_fn.train
    while session.step < session.max_steps and not session.stop:
        _begin_step(session, session.step + 1)
        if session.step + 1 in phases:
            session.emit("phase", session.step + 1, phases[session.step + 1])
        result = train(session, session.step + 1)
        _end_step(session, result)
        if session.control is not None:
            _end_step_together(session, first=session.step == step + 1)
    return _finish(session, trained=session.step > step)


def _begin_step(session: TrainingSession, step: int) -> None:
    if session.freeze.apply(step):  # by `>=`, so that a skipped step cannot lose a stage
        session.freeze.set_modes(session.model)
        session.metrics.recount_flops()
        session.emit("phase", step, f"freeze stage {session.freeze.stage}")
    if session.profiler is not None:
        session.profiler.step_begin(step)


def _end_step(session: TrainingSession, result: StepResult) -> None:
    """Bookkeeping, the same for good and for skipped steps."""
    session.step += 1
    session.tokens_seen += result.tokens
    session.metrics.meter.count(result.tokens, result.counts)
    for after in session.after_updates:
        after(session.step, result.ok)
    if result.counts["tokens"]:
        session.guard.observe(session.step, result.ok, result.objective, result.grad_norm)
    else:
        session.guard.skipped += 1
        session.emit("skipped", session.step, "no supervised token")
    _heed_verdicts(session)
    if session.events["step_end"]:
        session.emit("step_end", session.step, result)
    if session.metrics.due(session.step):
        session.metrics.log(session.step, result)
    if session.profiler is not None:
        session.profiler.step_end(session.step)
    if session.step >= session.max_steps:
        return  # `_finish` evaluates and saves, in this order: the last one, too, is ranked by its metrics
    interval = session.config[EvalConfig].interval
    if interval and session.step % interval == 0:
        _evaluate(session)
    _save_if_due(session, "scheduled")


def _end_step_together(session: TrainingSession, first: bool) -> None:
    """What several ranks do besides, once an update is done."""
    control = session.control
    assert control is not None
    if control.step != session.step:  # a step function that counts by itself
        session.check_stop()
        control.step = session.step
    if session.watch is not None:
        session.watch.step = session.step
    if first:  # compiling and starting is over
        session.processes.set_timeout(session.config[DistributedConfig].timeout, control.group)


def _evaluate(session: TrainingSession) -> None:
    with session.metrics.paused():
        session.metrics.log_evaluation(session.step, evaluate(session))


def _heed_verdicts(session: TrainingSession, wait: bool = False) -> None:
    """Act on the guard's verdicts that have reached the host."""
    config = session.config[GuardConfig]
    for step, loss, norm in session.guard.learn(wait):
        reason = f"loss {loss:g}, gradient norm {norm:g}"
        where = ""
        if session.guard.incidents < config.incidents:
            session.guard.incidents += 1
            where = f": {write_incident(session, step, loss, norm)}"
        session.log.warning("step %d skipped (%s)%s", step, reason, where)
        session.emit("skipped", step, reason)
        streak = session.guard.streak
        if config.action == "stop":
            raise GuardError(f"step {step} is bad ({reason}) and guard.action is stop")
        if streak >= config.max_consecutive:
            way = "lower optimizer.lr, or raise guard.max_consecutive"
            if session.guard.skipped >= step:
                way = "no step was good: look at the weights that it starts from and at the data"
            raise GuardError(
                f"{counted(streak, 'bad step')} in a row, the last at step {step} ({reason})",
                f"see incidents/ in the run folder; {way}",
            )
        if config.action == "rollback" and session.checkpointer is not None:
            good = session.checkpointer.rollback(session)
            session.log.warning("rolled back to the state after step %d; the data goes on", good)


def _save_if_due(session: TrainingSession, kind: str) -> None:
    keeper = session.checkpointer
    if keeper is not None and keeper.due(session.step):
        _heed_verdicts(session, wait=True)  # what is saved knows the verdict on every update
        if keeper.due(session.step):
            _save(session, kind)


def _save(session: TrainingSession, kind: str) -> None:
    """Save the state, unless this step is saved already."""
    keeper = session.checkpointer
    if keeper is not None and session.saved_step != session.step:
        keeper.save(session, session.step, kind)
        session.saved_step = session.step


def _finish(session: TrainingSession, trained: bool) -> tuple[int, int]:
    _heed_verdicts(session, wait=True)
    if session.stop:
        _save(session, "emergency")
    else:
        config = session.config[EvalConfig]
        if config.at_end and trained:
            _evaluate(session)
        _save(session, "final")
    if session.checkpointer is not None:
        session.checkpointer.drain()
    session.emit("train_end", session.step, "signal" if session.stop else "done")
    return session.step, session.tokens_seen
