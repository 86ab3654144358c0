"""What each rank of `forge doctor --nproc N` runs: meet the others, and add up over all."""

from __future__ import annotations

import sys
from datetime import timedelta

from forge_core.launch.worker import attach, tell

LIMIT = timedelta(seconds=60)


def main() -> int:
    """The exit status: 0 if the ranks met and found the same sum."""
    attach()
    try:
        greet()
    except Exception as error:
        tell(error, 1, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return 1
    return 0


def greet() -> None:
    """Meet by the launcher's variables, on gloo, and check a sum over ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=LIMIT)
    size = dist.get_world_size()
    number = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(number)
    if number.item() != size * (size + 1) // 2:
        raise RuntimeError(f"the ranks add up to {number.item()}, not {size * (size + 1) // 2}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
