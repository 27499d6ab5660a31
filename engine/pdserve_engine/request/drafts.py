"""What may come behind a request's last token, and what became of that before."""

from pdserve_common.types.engine import DraftStats


class RequestDrafts:
    """`Results` writes it, of what steps bring."""

    __slots__ = ("forced_token_ids", "spec_token_ids", "stats")

    def __init__(self) -> None:
        # By the draft model, and by the grammar, which leaves no choice but how its text is cut
        # into tokens.
        self.spec_token_ids: tuple[int, ...] = ()
        self.forced_token_ids: tuple[int, ...] = ()
        # The drafts since the last output.
        self.stats: list[DraftStats] = []

    def take_stats(self) -> tuple[DraftStats, ...]:
        stats = tuple(self.stats)
        self.stats.clear()
        return stats
