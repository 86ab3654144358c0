"""How one model runs on many ranks: tensor, sequence and context parallel, FSDP2, recomputation.

Everything is attached to modules by what they are (`SplitSpec`, `TensorPlan`, roles), never by their class.
"""
