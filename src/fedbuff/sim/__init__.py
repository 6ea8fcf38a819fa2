"""The simulator in virtual time: `timeline.py` without training, `simulate.py` with it.

Where things are:

    timing, availability, until          how long trips take, when clients are there, when a run ends
    clock, plan, steps, fastplan         who trains when, and which trips make each server step; the last is the same compiled
    timeline                             the plan alone
    simulate, refused                    a run's arguments, put together and checked
    simulation                           a run under way
    ahead                                trips trained in bulk before they are needed
    pool, workers, ray, shared, memory   who trains them: processes here or on a cluster, with memory that they share
    sums, secure                         a buffer's sum: in the open, or by secure aggregation
"""
