"""FedBuff over a network: the same core that was simulated, driven by real clients. Flower is one file of it."""
