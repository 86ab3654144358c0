"""The dense text family: decoder, forward, data and generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from forge_core.config.tables import EvalConfig, ModelConfig, TrainConfig
from forge_core.contract.parts import Alias, Transform
from forge_core.errors import Problem
from forge_core.markers import hookimpl

if TYPE_CHECKING:
    from torch import nn

    from forge_core.config.config import Config
    from forge_core.contract import Architecture, DataPipeline, Forward, Generator, LayerInfo
    from forge_core.loop.session import TrainingSession


@hookimpl
def forge_problems(config: Config) -> Iterator[Problem]:
    model, train = config[ModelConfig], config[TrainConfig]
    if model.max_seq_len is not None and train.seq_len > model.max_seq_len:
        yield Problem(
            "train.seq_len",
            f"{train.seq_len} is longer than model.max_seq_len = {model.max_seq_len}",
            f"set train.seq_len to at most {model.max_seq_len}, or raise model.max_seq_len",
        )
    sample = config[EvalConfig].sample_tokens or 0
    if model.max_seq_len is not None and sample >= model.max_seq_len:
        yield Problem(
            "eval.sample_tokens",
            f"{sample} leaves no room for a prompt in model.max_seq_len = {model.max_seq_len}",
        )


@hookimpl
def forge_flops(config: Config) -> float:
    from forge_core.model.flops import flops_per_token

    return flops_per_token(config[ModelConfig], config[TrainConfig].seq_len)


@hookimpl
def forge_architectures() -> Mapping[str, Architecture]:
    from forge_core.model.architectures import ARCHITECTURES

    return ARCHITECTURES


@hookimpl(trylast=True)
def forge_build_decoder(session: TrainingSession) -> nn.Module:
    from forge_core.model import build_decoder
    from forge_core.model.hooked import HookedParts

    return build_decoder(session.config[ModelConfig], HookedParts(session))


@hookimpl(trylast=True)
def forge_build_model(decoder: nn.Module) -> nn.Module:
    return decoder


@hookimpl(trylast=True)
def forge_build_block(session: TrainingSession, layer: LayerInfo) -> nn.Module:
    from forge_core.model.hooked import HookedParts

    return HookedParts(session).default.block(layer)


@hookimpl(trylast=True)
def forge_build_mixer(layer: LayerInfo) -> nn.Module:
    from forge_core.model import default_parts

    return default_parts(layer.model).mixer(layer)


@hookimpl(trylast=True)
def forge_build_ffn(layer: LayerInfo) -> nn.Module:
    from forge_core.model import default_parts

    return default_parts(layer.model).ffn(layer)


@hookimpl(trylast=True)
def forge_build_embed(layer: LayerInfo) -> nn.Module:
    from forge_core.model import default_parts

    return default_parts(layer.model).embed(layer)


@hookimpl
def forge_model_transforms(session: TrainingSession) -> Iterator[Transform]:
    if session.config[ModelConfig].init_from is not None:
        from forge_core.loop.transforms import start_from_weights

        yield Transform(
            phase="adapt", name="init_from", apply=lambda model: start_from_weights(session, model)
        )


@hookimpl
def forge_module_aliases() -> list[Alias]:
    return [
        Alias(name="embedding", patterns=("embed.*", "*.embed.*")),
        Alias(name="blocks", patterns=("layers.*", "*.layers.*")),
        Alias(name="head", patterns=("head.*", "*.head.*", "norm.*")),
    ]


@hookimpl(trylast=True)
def forge_build_forward(session: TrainingSession) -> Forward:
    from forge_core.model.forward import TextForward

    return TextForward(session)


@hookimpl(trylast=True)
def forge_build_data(session: TrainingSession) -> DataPipeline:
    from forge_core.data.pipeline import build_text_data

    return build_text_data(session)


@hookimpl(trylast=True)
def forge_build_generator(session: TrainingSession) -> Generator:
    from forge_core.model.generate import DecoderGenerator

    return DecoderGenerator()
