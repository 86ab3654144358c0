"""Experts on several ranks: losses, norms, weights, biases and counts are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
from moeruns import Tables, check, run, tables

from forge_core.testing.pool import WorkerPool
from forge_moe.experts import local


@pytest.mark.parametrize("aux_loss", ["sequence", "global", "exact"])
def test_two_data_ranks(pool2: WorkerPool, aux_loss: str) -> None:
    more: Tables = {"moe": {**tables()["moe"], "aux_loss": aux_loss}}
    check(pool2, tables(**more), tables(2, **more))


@pytest.mark.parametrize("aux_loss", ["sequence", "exact"])
def test_experts_over_two_ranks(pool2: WorkerPool, aux_loss: str) -> None:
    more: Tables = {"moe": {**tables()["moe"], "aux_loss": aux_loss}}
    check(pool2, tables(**more), tables(2, **{**more, "moe": {**more["moe"], "ep": 2}}))


def test_experts_over_two_ranks_with_accumulation_and_recomputation(pool2: WorkerPool) -> None:
    train = {**tables(2, 2)["train"], "activation_checkpointing": "full"}
    check(pool2, tables(), tables(2, train=train, moe={"ep": 2}))


def test_frozen_experts_over_two_ranks_count_as_in_one_process(pool2: WorkerPool) -> None:
    more: Tables = {"freeze": {"modules": ["experts"]}}
    one, many = run(tables(**more)), tables(2, **more, moe={"ep": 2})
    assert [rank["flops"] for rank in pool2.run(run, many)] == [one["flops"]] * 2
    assert one["flops"] < run(tables())["flops"]


def test_scaled_gradients_and_offloaded_weights(pool2: WorkerPool) -> None:
    more: Tables = {"moe": {**tables()["moe"], "gradient_scaling": True}}
    many = tables(2, moe={"gradient_scaling": True, "ep": 2}, distributed={"cpu_offload": True})
    check(pool2, tables(**more), many)


def test_biases_of_experts_over_two_ranks(pool2: WorkerPool) -> None:
    model = {"n_kv_heads": 2, "ffn_hidden_dim": 24, "mlp_bias": True}
    scaled = {"gradient_scaling": True}
    one = tables(model=model, moe=scaled)
    check(pool2, one, tables(2, model=model, moe={**scaled, "ep": 2}))


def test_experts_over_two_of_four_ranks(pool4: WorkerPool) -> None:
    check(pool4, tables(), tables(4, moe={"ep": 2}))


def test_experts_over_all_of_four_ranks(pool4: WorkerPool) -> None:
    check(pool4, tables(), tables(4, moe={"ep": 4}))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_experts_beside_tensor_ranks(pool4: WorkerPool, sequence_parallel: bool) -> None:
    sizes = {"tp": 2, "sequence_parallel": sequence_parallel}
    check(pool4, tables(), tables(2, moe={"ep": 2}, distributed=sizes))


def test_experts_beside_replicas(pool4: WorkerPool) -> None:
    check(pool4, tables(), tables(4, moe={"ep": 2}, distributed={"dp_replicate": 2}))


def test_context_ranks(pool2: WorkerPool) -> None:
    check(pool2, tables(), tables(1, distributed={"cp": 2}))


def test_experts_beside_context_ranks(pool4: WorkerPool) -> None:
    check(pool4, tables(), tables(2, moe={"ep": 2}, distributed={"cp": 2}))


def held(pool: WorkerPool, tables: Tables) -> set[int]:
    return {found["held"] for found in pool.run(run, tables, timeout=100)}


@pytest.mark.slow
def test_each_rank_holds_its_share(pool4: WorkerPool) -> None:
    """All of it divided by 4, however the ranks are arranged; by 2 where there are two replicas."""
    whole = run(tables())["held"]
    assert held(pool4, tables(4, moe={"ep": 2})) == {whole // 4}
    assert held(pool4, tables(2, moe={"ep": 2}, distributed={"cp": 2})) == {whole // 4}
    assert held(pool4, tables(4, moe={"ep": 2}, distributed={"dp_replicate": 2})) == {whole // 2}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_experts_over_two_ranks(pool2: WorkerPool, recompute: str) -> None:
    train = {
        **tables(2)["train"],
        "compile": True,
        "compile_backend": "aot_eager",
        "activation_checkpointing": recompute,
    }
    check(pool2, tables(), tables(2, train=train, moe={"ep": 2}))


def routers_in_bf16(tables: Tables) -> dict[str, Any]:
    """The dtypes that a router and an expert compute in."""
    seen: dict[str, Any] = {}
    from forge_moe import experts, routing

    plain_logits, plain_times = routing.Router.logits, experts.grouped_linear

    def logits(self: Any, x: Any) -> Any:
        found = plain_logits(self, x)
        seen["router"] = (str(local(self.weight).dtype), str(found.dtype))
        return found

    def times(x: Any, *rest: Any) -> Any:
        seen["experts"] = str(x.dtype)
        return plain_times(x, *rest)

    routing.Router.logits, experts.grouped_linear = logits, times  # type: ignore[method-assign]
    try:
        return {**run(tables), "dtypes": seen}
    finally:
        routing.Router.logits, experts.grouped_linear = plain_logits, plain_times  # type: ignore[method-assign]


def test_routers_stay_exact_in_bf16(pool2: WorkerPool) -> None:
    train = {**tables(2)["train"], "dtype": "bf16"}
    one = routers_in_bf16(tables(train={**train, "batch_size": 4}))
    for found in (one, *pool2.run(routers_in_bf16, tables(2, train=train, moe={"ep": 2}), timeout=100)):
        assert found["dtypes"] == {"router": ("torch.float32", "torch.float32"), "experts": "torch.bfloat16"}
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-3)


MLA = {"kv_rank": 6, "q_rank": 4, "nope_dim": 6, "v_dim": 10}


@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}])
def test_latent_attention_over_ranks(pool2: WorkerPool, layout: dict[str, int]) -> None:
    more: Tables = {"moe": {**tables()["moe"], "mla": MLA}}
    check(pool2, tables(**more), tables(**more, distributed=layout))
