"""Visual tokens stand in the sequence like text, and one decoder sees both (LLaVA; Liu et al. 2023)."""

from __future__ import annotations

from forge_vlm.fusions.base import Fusion


class JointFusion(Fusion):
    """Causal over all tokens; `bidirectional` lets visual tokens or the prompt see later ones among them."""

    features_travel = False
