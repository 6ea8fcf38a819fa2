"""The simulator in virtual time: `timeline.py` without training, `simulate.py` with it, `clock.py` beneath both."""
