"""The simulator's slow twin: one event at a time, one trip at a time, through `Server.handle`, as a deployment would.

No plan, no look-ahead, no chunks: what `fedbuff.simulate` must agree with, bit for bit if it trains with the same loop.
"""

from fedbuff import CancelTrip, Server, StartTrip, StepTaken, Task, TripFailed, UpdateArrived, UpdateRejected, Wake, Woke
from fedbuff.core.trips import CANCELLED, DROPPED, FAILED, LATE, UNUSED, Trips
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.local import Job, initial_weights, one_at_a_time
from fedbuff.sim.clock import ARRIVES, DROPS, WAKES, Clock
from fedbuff.sim.plan import with_rate
from fedbuff.sim.timing import Sizes, half_normal


def lockstep(
    server: Server,
    task: Task,
    client: LocalSGD,
    trips: int,
    seed: int = 0,
    timing=half_normal(1.0),
    availability=None,
    protect=None,
    **how,
):
    """The model, and the trips table, after so many trips have ended. `protect(clients, weights)`: the server's protection."""
    n, sizes = len(task.clients), Sizes(task.examples)
    flat, weights = initial_weights(task, seed)
    train = one_at_a_time(task, client, seed, flat)
    clock = Clock(timing, seed, sizes, availability=availability, **how)
    start, protection = with_rate(server.start, clock, n), protect and protect(n, len(weights))
    server = server.bind(weights, n, seed=seed, start=start, available=availability, protection=protection)
    table = Trips()

    def obey(commands, version=0):
        for command in commands:
            match command:
                case StartTrip(trip, who, start):
                    clock.start(trip, who)
                    table.started(who, task.examples(who), clock.now, start)
                case StepTaken(step, used, _, scales):
                    for trip, weight in zip(used, scales, strict=True):
                        table.used(trip, weight, step)
                case CancelTrip(trip):
                    clock.cancel(trip)
                    table.end(trip, clock.now, version, CANCELLED)
                case UpdateRejected(trip, reason):
                    table.outcome[trip] = LATE if "max_staleness" in reason else FAILED
                case Wake(at):
                    clock.wake(at)

    obey(server.begin())
    while table.ended < trips:
        now, trip, ending = clock.next()
        version = server.version
        if ending == WAKES:
            obey(server.handle(Woke(now)))
        elif ending == ARRIVES:
            job = Job(trip, table.client[trip], server.versions[table.start_version[trip]])
            table.end(trip, now, version, UNUSED)
            obey(server.handle(UpdateArrived(trip, train([job])[0], table.examples[trip], now)), version)
        else:
            table.end(trip, now, version, DROPPED if ending == DROPS else LATE)
            obey(server.handle(TripFailed(trip, "", now)), version)
    return flat.named(server.model), table.arrays()
