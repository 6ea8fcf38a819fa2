"""Why something that came over the network was not used: few reasons, so that they can be counted."""

from fedbuff.core.trips import DROPPED, FAILED
from fedbuff.core.trips import LATE as TOO_LATE

DEADLINE, PROBLEM = "deadline", "client failed"
UNKNOWN, ANOTHERS, TWICE, LATE = "unknown trip", "another client's trip", "sent twice", "too late"
OVER, NOT_SEALED, NOT_ASKED = "the run is over", "refused by the trusted aggregator", "not asked for"
SHUT_OUT, TAKEN = "shut out", "clients of another gateway"
SIZE, NOT_FINITE, TOO_LONG, EXAMPLES, RATE = "wrong size", "not finite", "norm too large", "bad number of examples", "too often"
MALFORMED, OTHER_JOB, NOT_ITS_CLIENTS = "malformed report", "another run's report", "clients that are not its own"
STRIKES = (UNKNOWN, ANOTHERS, SIZE, NOT_FINITE, TOO_LONG, EXAMPLES, RATE, MALFORMED, NOT_ITS_CLIENTS)

_OUTCOMES = {DEADLINE: TOO_LATE, LATE: TOO_LATE} | dict.fromkeys((SIZE, NOT_FINITE, TOO_LONG, EXAMPLES, NOT_SEALED), FAILED)


def outcome(reason: str) -> int:
    """What became of a trip that ended for this reason, as its row in trips.parquet has it."""
    return _OUTCOMES.get(reason, DROPPED)
