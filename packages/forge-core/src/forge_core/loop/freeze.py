"""Which modules train, and when that changes: `[freeze]` over the aliases of the plugins."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from forge_core.config.tables import FreezeConfig
from forge_core.contract import Alias
from forge_core.errors import ConfigError, Problem


class Freeze:
    """The freeze schedule over the parameters of a model.

    What is frozen for update n: the aliases frozen by default and `freeze.modules`, until the last stage with
    `start_step <= n` replaces `freeze.modules` and the defaults. A stage whose step was skipped still
    applies.

    Args:
        named: parameters by global name.
        aliases: names for parts of the model.
        elsewhere: names of parameters that other ranks have, where this one has a part of the model.

    Raises:
        ConfigError: a name is neither an alias nor a pattern that matches; nothing ever trains.
    """

    def __init__(
        self,
        config: FreezeConfig,
        named: Mapping[str, nn.Parameter],
        aliases: Sequence[Alias],
        elsewhere: Iterable[str] = (),
    ) -> None:
        self.named = dict(named)
        self.elsewhere = frozenset(elsewhere) - self.named.keys()
        self.aliases = {alias.name: alias for alias in aliases}
        defaults = [alias.name for alias in aliases if alias.frozen]
        self.starts = [0, *(stage.start_step for stage in config.stages)]
        places = ["freeze.modules", *(f"freeze.stages.{i}.modules" for i in range(len(config.stages)))]
        lists = [defaults + config.modules, *(stage.modules for stage in config.stages)]
        problems: list[Problem] = []
        self.frozen = [
            frozenset(self._names(names, place, problems)) for names, place in zip(lists, places, strict=True)
        ]
        if problems:
            raise ConfigError(problems)
        self._frozen_elsewhere = [
            frozenset(name for spec in names for name in self._matching(spec, self.elsewhere))
            for names in lists
        ]
        if self._nothing_trains():
            message = "every parameter is frozen, from the first update to the last"
            raise ConfigError(
                [Problem("freeze.modules", message, "leave something out, or add a stage that does")]
            )
        self.stage = -1

    def _names(self, specs: Iterable[str], place: str, problems: list[Problem]) -> Iterable[str]:
        for spec in specs:
            found = self.match(spec)
            if not found and not self._matching(spec, self.elsewhere):
                near = difflib.get_close_matches(spec, self.aliases, n=1)
                hint = (
                    f"did you mean {near[0]!r}?"
                    if near
                    else f"aliases: {', '.join(sorted(self.aliases)) or 'none'}"
                )
                problems.append(Problem(place, f"{spec!r} matches no parameter", hint))
            yield from found

    def match(self, spec: str) -> list[str]:
        """Global names of the parameters that an alias or an fnmatch pattern stands for."""
        return self._matching(spec, self.named)

    def _matching(self, spec: str, names: Iterable[str]) -> list[str]:
        patterns = self.aliases[spec].patterns if spec in self.aliases else (spec, f"{spec}.*")
        return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]

    def frozen_at(self, spec: str, step: int) -> tuple[int, int]:
        """How many parameters an alias or a pattern freezes in update `step`, of how many that it stands for;
        those that other ranks have are among them, so that all ranks find the same."""
        names = [*self.match(spec), *self._matching(spec, self.elsewhere)]
        return len(self.frozen_names(spec, step)), len(names)

    def frozen_names(self, spec: str, step: int) -> list[str]:
        """Which parameters these are, sorted by name."""
        stage = max(i for i, start in enumerate(self.starts) if start <= step)
        frozen = self.frozen[stage] | self._frozen_elsewhere[stage]
        return sorted(self._matching(spec, frozen))

    def frozen_now(self) -> frozenset[str]:
        """Names of the parameters that do not train now, on whatever rank."""
        stage = max(self.stage, 0)
        return self.frozen[stage] | self._frozen_elsewhere[stage]

    def _nothing_trains(self) -> bool:
        """Whether there are parameters, and all of them are frozen under every stage, on whatever rank."""
        names = self.named.keys() | self.elsewhere
        always = frozenset.intersection(*self.frozen) | frozenset.intersection(*self._frozen_elsewhere)
        return bool(names) and names <= always

    def trains(self, spec: str) -> bool:
        """Whether any parameter that an alias or a pattern stands for trains now, on whatever rank."""
        names = {*self.match(spec), *self._matching(spec, self.elsewhere)}
        return not names <= self.frozen_now()

    def ever_trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that train under at least one stage, by global name."""
        always = frozenset.intersection(*self.frozen)
        return {name: p for name, p in self.named.items() if name not in always}

    def apply(self, step: int) -> bool:
        """Set `requires_grad` for update `step`; True where another stage than before applies."""
        stage = max(i for i, start in enumerate(self.starts) if start <= step)
        if stage == self.stage:
            return False
        for name, parameter in self.named.items():
            trains = name not in self.frozen[stage]
            parameter.requires_grad_(trains)
            if not trains:
                parameter.grad = None  # a stale or zero gradient would still be stepped and decayed
        self.stage = stage
        return True

    def set_modes(self, model: nn.Module) -> None:
        """Training mode everywhere but in modules that hold parameters all of which are frozen."""
        model.train()
        for module in model.modules():
            parameters = list(module.parameters())
            if parameters and not any(p.requires_grad for p in parameters):
                module.eval()
