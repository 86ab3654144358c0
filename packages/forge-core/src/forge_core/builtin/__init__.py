"""The core's own answers, through the same hooks as everybody's. None of these modules imports torch."""

from forge_core.builtin import data, parallel, parts, text, training

BUILTINS = (parts, data, text, training, parallel)
