"""Slots among a tenant's concurrent requests, for calls whose parts begin one after the other."""

from types import TracebackType

from pdserve_router.requests.tenants.tenant_account import Account


class PartSlots:
    """Those of one call: a part that ends leaves its slot to one that is to follow, so that no
    other call of the tenant takes it in between. Use as a context manager around the call: what no
    part has taken is given back at its end.
    """

    def __init__(self) -> None:
        # Parts that have not begun.
        self.num_to_follow = 0
        self._left: list[Account] = []

    def leave(self, account: Account) -> bool:
        """A part has ended; False if nobody needs its slot."""
        if len(self._left) >= self.num_to_follow:
            return False
        self._left.append(account)
        return True

    def take(self, account: Account) -> bool:
        """A part begins; False if no slot of this account was left to it. A tenant whose limits
        are taken away and come back during the call has another account than before.
        """
        self.num_to_follow -= 1
        for index, left in enumerate(self._left):
            if left is account:
                del self._left[index]
                return True
        return False

    def __enter__(self) -> "PartSlots":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.num_to_follow = 0
        for account in self._left:
            account.num_running -= 1
        self._left.clear()
