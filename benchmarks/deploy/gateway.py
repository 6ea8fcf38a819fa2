"""A gateway whose clients train nothing: `gateway.py SETTINGS SUPERLINK CLIENTS FOLDER [KEY CERTIFICATES]`."""

import logging
import sys
from pathlib import Path

import numpy as np

from fedbuff.deploy.clients import Clients
from fedbuff.deploy.gateway import gateway
from fedbuff.deploy.outbox import Outbox
from fedbuff.deploy.serve import digest_of
from fedbuff.deploy.settings import ranges
from fedbuff.deploy.wire import Orders
from fedbuff.learn.local import initial_weights
from fedbuff.settings import from_tables, read


class Nothing:
    """Updates that are all the same, in no time."""

    def train(self, updates, rows, trips, clients, weights):  # type: ignore[no-untyped-def]
        updates[:] = 1e-6
        updates[:, 0] = np.asarray(trips)  # no two the same, or Flower would send one of them only


def main() -> None:
    settings_path, superlink, clients, folder, *secure = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%M:%S")
    settings = from_tables(read(Path(settings_path)))
    make, arguments = settings.task
    weights = len(initial_weights(make(**arguments), settings.seed)[1])
    sgd = digest_of(settings.client, settings.seed, weights)
    mine = Clients(Nothing(), ranges(clients), Outbox(Path(folder) / "outbox.sqlite"), sgd=sgd)
    work = lambda orders: mine.work(Orders.from_bytes(orders)).to_bytes()  # noqa: E731
    if secure:
        gateway(work, superlink, key=Path(secure[0]), root_certificates=Path(secure[1]))
    else:
        gateway(work, superlink, insecure=True)


if __name__ == "__main__":
    main()
