"""A bench for code that runs on many ranks: write a function, run it on N real gloo ranks, look at what each returned.

    import torch
    import torch.distributed as dist
    from distclip.testing import RankPool

    def total(factor):                       # at the top level of a file, so that the ranks can import it
        value = torch.tensor(float(dist.get_rank())) * factor
        dist.all_reduce(value)
        return value.item()

    with RankPool() as pool:
        assert pool.run(total, 4, 10.0) == [60.0] * 4

- `RankPool` (distclip.testing.pool) keeps up to eight rank processes warm, so that a job costs milliseconds. Every job
  gets a fresh default process group of exactly the ranks it asked for.
- `RankFailure` is what `run` raises: the exception of every rank that failed, its traceback, and the stack of every
  rank that hung. A rank that hangs or dies is replaced, and the next job works.
- `distclip.testing.oracle` gathers full gradients and computes norms and clipped gradients in numpy float64.
- `distclip.testing.collectives` counts the collectives that a piece of code issues.

The package does not need pytest. A fixture is three lines:

    @pytest.fixture(scope="session")
    def ranks():
        with RankPool() as pool:
            yield pool.run
"""

from __future__ import annotations

from distclip.testing.failures import RankDied, RankError, RankFailure, RankHung
from distclip.testing.pool import RankPool

__all__ = ["RankDied", "RankError", "RankFailure", "RankHung", "RankPool"]
