"""What do stragglers cost? Synchronous rounds wait for their slowest trip, over-selection throws it away, FedBuff uses it.

Appendix "Wall-Clock Time Simulation" of the paper: a trip takes Exp(1 / (λ n_i)), λ n_i on
average, n_i the client's number of examples.
"""

import fedbuff as fb

task = fb.tasks.synthetic(clients=5000)
timing = fb.per_example(fb.exponential(1.0))
rules = {
    "FedAvg": (fb.cohort(100), 100),
    "FedAvg, 30 % over-selection": (fb.cohort(100, over_selection=0.3), 100),
    "FedBuff": (fb.refill(100), 10),
}
print(f"{'':30}updates used per unit of time   examples per used trip")
for name, (start, k) in rules.items():
    t = fb.timeline(start=start, buffer_size=k, timing=timing, clients=5000, trips=20_000, examples=task.examples)
    used = t.outcome == "used"
    print(f"{name:30}{used.sum() / t.end_time[used].max():27.2f}{t.examples[used].mean():25.1f}")
