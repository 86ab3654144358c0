"""One save: gather, agree with the other ranks, copy to memory, write, and make it appear as a whole.

Everything up to the copy happens in the training thread; the rest does too in mode "sync", and in a thread of
its own in mode "async". Ranks talk over groups of their own, one a thread, so that nothing interleaves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from forge_ckpt.comm import Control
from forge_ckpt.errors import CheckpointError
from forge_ckpt.gathering import Gathered, GroupValues, gather, run_state, surroundings
from forge_ckpt.layout import CONFIG, EXTRAS, INDEX, STATE, rank_file
from forge_ckpt.manifest import FileSum, Manifest
from forge_ckpt.planning import Planner
from forge_ckpt.staging import Copier, StagedFile
from forge_ckpt.store import Store
from forge_core.optim.mode import current_mode, optimizer_mode

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


@attrs.define(kw_only=True)
class Save:
    """A save on its way.

    Attributes:
        step, kind, serial, milestone, metrics: as in the manifest.
        token: of this attempt; part of the temporary name.
        files: this rank's files with tensors, by path.
        texts: this rank's other files.
        failed: why this rank has no copy of its state; `write` tells all.
        done: the result of writing, where that happens in the background.
        durable_at: when it was complete on disk (`time.perf_counter`).
        name: of the checkpoint, once it is complete.
    """

    step: int
    kind: str
    serial: int
    token: str
    milestone: bool = False
    metrics: Mapping[str, float] = attrs.Factory(dict)
    files: dict[str, StagedFile] = attrs.Factory(dict)
    texts: dict[str, bytes] = attrs.Factory(dict)
    failed: Exception | None = None
    done: Future[str] | None = None
    durable_at: float = 0.0
    name: str | None = None


class Saver:
    """Makes saves of a session; keeps plan and buffers from one to the next.

    Args:
        control: for the training thread. behind: for the thread that writes.
        values: tells state in parameter groups from configuration.
    """

    def __init__(
        self,
        session: TrainingSession,
        store: Store,
        control: Control,
        behind: Control,
        values: GroupValues,
    ) -> None:
        self.session, self.store = session, store
        self.control, self.behind, self.values = control, behind, values
        self.planner = Planner(control)
        self.copier = Copier(session.device)
        self.pin = session.device.type == "cuda"
        self.files: dict[str, StagedFile] = {}
        self.config_text = session.config.to_toml().encode()

    def stage(self, save: Save, *, lazily: bool) -> None:
        """Copy everything of this moment to memory; with `lazily` parameters and moments until `copier.hold`.

        Collective: what fails on one rank is raised on all, here or, where only the copy failed, by `write`.

        Raises:
            CheckpointError: names the ranks and their reasons.
        """
        optimizers = [named.optimizer for named in self.session.optimizers.values()]
        training = [o for o in optimizers if hasattr(o, "eval") and current_mode(o) == "train"]
        for optimizer in training:
            optimizer_mode(optimizer, "eval")  # the weights it has to offer; the others go along as state
        try:
            self._stage(save, lazily=lazily and not training)
        finally:
            for optimizer in training:
                optimizer_mode(optimizer, "train")

    def _stage(self, save: Save, *, lazily: bool) -> None:
        gathered, error, mine = None, "", ""
        try:
            gathered = gather(self.session, self.values)
            mine = self.planner.fingerprint({**gathered.live, **gathered.fixed})
        except Exception as raised:
            failed: Exception | None = raised
            error = f"{type(raised).__name__}: {raised}"
        else:
            failed = None
        answers = self.control.gather([error, mine, gathered.groups if gathered else {}])
        if bad := {rank: answer[0] for rank, answer in enumerate(answers) if answer[0]}:
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in bad.items())
            raise CheckpointError(
                f"the state after update {save.step} cannot be saved: {reasons}"
            ) from failed
        assert gathered is not None
        self.planner.plan([answer[1] for answer in answers])
        try:
            self._texts(save, gathered, merged_groups([answer[2] for answer in answers]))
            self._copy(save, gathered, lazily=lazily)
        except Exception as raised:  # of memory there is not enough on one rank alone
            save.failed = raised

    def _texts(self, save: Save, gathered: Gathered, groups: dict[str, Any]) -> None:
        rank = self.control.rank
        save.texts[f"state_{rank:05d}.json"] = _json(gathered.rank_tree)
        if not self.control.is_main:
            return
        tree, tensors = run_state(self.session, save.step)
        gathered.rank_tensors.update(tensors)
        extras: dict[str, dict[str, Any]] = {}
        for plugin, name, version, value, found in gathered.extras:
            extras.setdefault(plugin, {})[name] = {"version": version, "state": value}
            if found:
                path = f"{EXTRAS}/{plugin}/{name}.safetensors"
                save.files[path] = self._file(path, found)
                self.copier.copy(*save.files[path].copies(found))
        for plugin, parts in extras.items():
            for name, part in parts.items():
                save.texts[f"{EXTRAS}/{plugin}/{name}.json"] = _json(part)
        state = {**tree, "optimizers": groups, "surroundings": surroundings(self.session)}
        state["global_batch"] = global_batch(self.session)
        state["extras"] = {plugin: sorted(parts) for plugin, parts in extras.items()}
        save.texts[STATE] = _json(state)
        save.texts[INDEX] = self.planner.text
        save.texts[CONFIG] = self.config_text

    def _copy(self, save: Save, gathered: Gathered, *, lazily: bool) -> None:
        now: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for path, parts in self.planner.mine().items():
            sources = {part.key: _local(gathered.live, gathered.fixed, name) for name, part in parts}
            save.files[path] = self._file(path, sources)
            fixed = {part.key for name, part in parts if name in gathered.fixed}
            for key, source in sources.items():
                place = now if key in fixed or not lazily else later
                place[0].append(save.files[path].views[key])
                place[1].append(source)
        path = rank_file("state", self.control.rank)
        save.files[path] = self._file(path, gathered.rank_tensors)
        places, sources_ = save.files[path].copies(gathered.rank_tensors)
        self.copier.copy(now[0] + places, now[1] + sources_)
        self.copier.start(*later)

    def _file(self, path: str, tensors: Mapping[str, Tensor]) -> StagedFile:
        """A buffer for a file: that of the last save where it fits."""
        file = self.files.get(path)
        if file is None or not file.fits(tensors):
            file = self.files[path] = StagedFile(tensors, pin=self.pin)
        return file

    def write(self, save: Save, control: Control) -> str:
        """Write this rank's files and, once all ranks have, make the checkpoint appear; its name. Collective.

        Raises:
            CheckpointError: a rank could not copy or write; nothing appeared, and what was written is
                removed.
        """
        sums: dict[str, FileSum] = {}
        error: list[str] = []
        failed = save.failed
        try:
            if failed is not None:
                raise failed
            self.copier.finished()
            folder = self.store.begin(save.step, save.token)
            for path, text in save.texts.items():
                sums[path] = self.store.write(folder, path, [text])
            for path, file in save.files.items():
                sums[path] = self.store.write(folder, path, [file.data])
        except Exception as raised:
            failed, error = raised, _told(raised)
        answers = control.gather([error, {path: [s.size, s.xxh3] for path, s in sums.items()}])
        errors = {rank: answer[0] for rank, answer in enumerate(answers) if answer[0]}
        if control.is_main and not errors:
            errors = self._appear(save, [answer[1] for answer in answers])
        errors = control.broadcast(errors)
        if errors:
            if control.is_main:
                self.store.discard(save.step, save.token)
            raise CheckpointError(*next(iter(errors.values()))) from failed
        return self.store.final_name(save.step)

    def _appear(self, save: Save, files: list[dict[str, Any]]) -> dict[int, list[str]]:
        """Make the checkpoint appear, on rank 0; errors by rank. The others wait to be told, whatever
        happens here."""
        try:
            unseen = self._unseen(save, files)
            if not unseen:
                self._commit(save, files)
        except Exception as raised:
            return {0: _told(raised)}
        return unseen

    def _unseen(self, save: Save, files: list[dict[str, Any]]) -> dict[int, list[str]]:
        """Ranks whose files do not lie where rank 0 looks: their folder is another one."""
        folder = self.store.begin(save.step, save.token)
        return {
            rank: [
                f"rank 0 does not see {path}, which rank {rank} wrote to {self.store.where(folder)}",
                "all ranks must see the same folder: set run.dir or checkpoint.url",
            ]
            for rank, answer in enumerate(files)
            for path, (size, _) in answer.items()
            if rank and self.store.size(folder, path) != size
        }

    def _commit(self, save: Save, files: list[dict[str, Any]]) -> None:
        manifest = Manifest(
            step=save.step,
            kind=save.kind,
            serial=save.serial,
            milestone=save.milestone,
            metrics=dict(save.metrics),
            world_size=self.control.size,
            saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            files={path: FileSum(*entry) for answer in files for path, entry in answer.items()},
        )
        self.store.commit(save.step, save.token, manifest.to_text().encode())


def global_batch(session: TrainingSession) -> int:
    """Sequences of an update over all ranks."""
    from forge_core.config.tables import TrainConfig

    return session.config[TrainConfig].batch_size * session.grad_accum_steps * session.ranks.data_size


def merged_groups(ranks: list[dict[str, list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """Groups of all ranks, which need not hold the same parameters; those of one name once."""
    merged: dict[str, list[dict[str, Any]]] = {}
    for groups in ranks:
        for name, entries in groups.items():
            known = merged.setdefault(name, [])
            known += [entry for entry in entries if all(entry["name"] != other["name"] for other in known)]
    return merged


def _local(live: Mapping[str, Tensor], fixed: Mapping[str, Tensor], name: str) -> Tensor:
    """What this rank holds of a tensor, sharing memory."""
    tensor = live[name] if name in live else fixed[name]
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _told(error: Exception) -> list[str]:
    """An error as another rank can raise it: message and hint."""
    if isinstance(error, CheckpointError):
        return [error.message, error.hint]
    return [f"{type(error).__name__}: {error}"]


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
