"""Drive the server yourself: the same core that is simulated, here with threads in place of a network.

`Server` does no IO: it is told what happened and says what to do. This driver obeys.
"""

import queue
import threading

import numpy as np

import fedbuff as fb

GOAL = np.arange(5.0)
inbox: queue.Queue[fb.UpdateArrived] = queue.Queue()


def client(trip: int, weights: np.ndarray) -> None:
    """Somebody else's computer: a step towards the goal, sent back as Δ = before − after."""
    after = weights - 0.5 * (weights - GOAL)
    inbox.put(fb.UpdateArrived(trip, weights - after))


server = fb.Server(
    weights=np.zeros(5), clients=["ann", "bob", "cem", "dia", "eve"], start=fb.refill(concurrency=3), buffer_size=2
)
commands = server.begin()
while server.version < 20:
    for command in commands:
        match command:
            case fb.StartTrip(trip, _name, version):
                threading.Thread(target=client, args=(trip, server.versions[version])).start()
            case fb.StepTaken(version, _trips, staleness, _weights):
                print(f"version {version}: {server.weights.round(2)}, staleness {staleness}")
    commands = server.handle(inbox.get())
assert np.allclose(server.weights, GOAL, atol=0.2)
