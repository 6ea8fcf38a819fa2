"""What does the buffer size do to staleness? No training needed: the clock does not need the model."""

import fedbuff as fb

print("  K   mean  (M-1)/K   max")
for k in (1, 10, 100):
    t = fb.timeline(start=fb.refill(concurrency=1000), buffer_size=k, timing=fb.half_normal(1.0), clients=100_000, trips=50_000)
    print(f"{k:3d} {t.staleness.mean():6.1f} {999 / k:8.1f} {t.staleness.max():5d}")
