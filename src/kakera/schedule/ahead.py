"""Look-ahead: which rows may be computed once more before anybody has seen what they yield in this step.

A card that waits for the host between two decode steps loses a fifth of its time. Who decodes now decodes next, unless
it ends: so a plan names the rows that may follow, and whoever carries it out may launch their next step at once, with
tokens that only the device knows. The rule that goes with it: a row that was let ahead is in the next plan, with its
one token, unless its slot is given up (it ended, or was preempted). Its state is a token ahead, and would be computed
twice otherwise. What a row that ended has left lies in its slot and behind its last token, where nobody reads.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from kakera.contract.grid import PAGE
from kakera.contract.step import Segment


def followers(rows: Sequence[Segment], last: Container[str]) -> tuple[int, ...]:
    """Indices of those of a step's decode rows that may follow; there is no prompt in the step, whose rows would join.

    `last`: requests that end with this step by their length. Either all others follow or nobody: what joins rows that
    ran ahead costs a launch of its own, which is one more reading of the weights. Nobody does where one needs a page
    first (and saves what it has completed), or has drafts, since where it goes on is not known yet.
    """
    if any(len(row.tokens) > 1 for row in rows):
        return ()
    going = tuple(i for i, row in enumerate(rows) if row.request_id not in last)
    return () if any(rows[i].end % PAGE == 0 for i in going) else going
