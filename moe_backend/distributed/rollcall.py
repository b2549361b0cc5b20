# SPDX-License-Identifier: Apache-2.0
"""Who is still there? Asked once an exchange has failed.

A transport's error seldom names the dead rank: one broken connection fails every wait of a process.
So each rank that fails signs in at the group's store and looks who else does; those who do not are
dead or stuck. A living rank signs in when its own wait fails, which may be as late as the bound.
The store itself may hang with the process that hosts it, hence the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed import distributed_c10d


def grace(timeout_s: float) -> float:
    """The share of a wait's bound that is kept for the roll call."""
    return min(2.0, timeout_s / 4)


def missing_ranks(
    group: dist.ProcessGroup, suspects: Iterable[int], seconds: float
) -> list[int] | None:
    """Ranks of ``group`` that do not sign in within ``seconds``; None where the store is silent.

    Ends early once all but ``suspects`` are there.
    """
    awaited = set(range(group.size())) - set(suspects)
    present: set[int] = set()
    answered = threading.Event()

    def call() -> None:
        store = dist.PrefixStore(
            f"moe_backend/down/{group.group_name}", distributed_c10d._get_default_store()
        )
        store.set(str(group.rank()), "here")
        end = time.monotonic() + seconds * 0.9
        while True:
            for rank in set(range(group.size())) - present:
                if store.check([str(rank)]):
                    present.add(rank)
            answered.set()
            if awaited <= present or time.monotonic() > end:
                return
            time.sleep(0.02)

    def guarded() -> None:
        try:
            call()
        except Exception:  # the store's host is gone: the caller reports that nobody could be asked
            answered.clear()

    thread = threading.Thread(target=guarded, name="moe-backend-rollcall", daemon=True)
    thread.start()
    thread.join(seconds)
    if not answered.is_set():
        return None
    return sorted(set(range(group.size())) - present)
