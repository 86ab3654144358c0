"""The types that plugins and the core exchange. Importing them imports no torch."""

from forge_core.contract.architecture import Architecture, TensorRule, UnsuitedError
from forge_core.contract.layer import LayerContext, LayerInfo, Mixer, SplitSpec, SplittableModel, TensorPlan
from forge_core.contract.parts import (
    PHASES,
    Alias,
    CheckpointExtra,
    Component,
    MeshAxis,
    Metric,
    NamedOptimizer,
    Transform,
)
from forge_core.contract.runtime import (
    BatchStream,
    Checkpointer,
    DataPipeline,
    EvaluationSet,
    Evaluator,
    Generator,
    InitialWeights,
    Observer,
    SampleSource,
    Writer,
)
from forge_core.contract.step import Batch, Forward, LossTerm, Output, SplitForward, StepFn, StepResult

__all__ = [
    "PHASES",
    "Alias",
    "Architecture",
    "Batch",
    "BatchStream",
    "CheckpointExtra",
    "Checkpointer",
    "Component",
    "DataPipeline",
    "EvaluationSet",
    "Evaluator",
    "Forward",
    "Generator",
    "InitialWeights",
    "LayerContext",
    "LayerInfo",
    "LossTerm",
    "MeshAxis",
    "Metric",
    "Mixer",
    "NamedOptimizer",
    "Observer",
    "Output",
    "SampleSource",
    "SplitForward",
    "SplitSpec",
    "SplittableModel",
    "StepFn",
    "StepResult",
    "TensorPlan",
    "TensorRule",
    "Transform",
    "UnsuitedError",
    "Writer",
]
