"""The aggregation core: numpy and the standard library only, no IO, no clock, no torch.

Start with `server.py`, the paper's Algorithm 1. `schedule.py` is who trains when, `starting.py`, `staleness.py` and
`optimizers.py` are the three things one can choose, `events.py` is the language spoken.
"""
