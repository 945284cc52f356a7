"""What is divided: tokens of KV where all engines have tokens of one size, else bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.values import Bound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.balance.engine_look import InstanceLook


@dataclass(frozen=True)
class Budget:
    """``size`` is in bytes if ``in_bytes``, else in tokens, over all replicas and GPUs of all instances together.

    ``bound`` says of what: of idle cache, which limits bound, or of all KV, which caps bound.
    """

    size: int
    in_bytes: bool
    bound: Bound = Bound.LIMIT

    def token_cost(self, look: InstanceLook) -> int:
        """Return what one token of an instance's limit takes of the budget; 0 where the engine does not say."""
        return look.token_bytes if self.in_bytes else len(look.replicas)

    def held(self, look: InstanceLook) -> int:
        """Return what an instance holds of the budget, or may at this moment."""
        if not self.in_bytes:
            return sum(replica.held_tokens for replica in look.replicas)
        return sum(max(one.held_tokens * one.token_bytes, one.resident_bytes) for one in look.replicas)

    def unfit(self, looks: Sequence[InstanceLook]) -> str:
        """Return why these instances cannot share this budget, with what to do, or an empty text."""
        silent = [look.name for look in looks if self.token_cost(look) == 0]
        if silent:
            return f"{', '.join(silent)} does not report bytes per token; give --budget in tokens"
        sizes = {look.token_bytes / len(look.replicas) for look in looks if look.token_bytes}
        if not self.in_bytes and len(sizes) > 1:
            return "these engines have tokens of different size; give --budget in bytes, such as 20GiB"
        places = {look.gpus for look in looks}
        if len(places) > 1:
            named = "; ".join(f"{look.name}: {', '.join(look.gpus)}" for look in looks)
            return f"a byte on one GPU is none on another ({named}); balance the instances of each set of GPUs apart"
        return ""
