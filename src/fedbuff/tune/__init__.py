"""Tuning: a search for learning rates, momentum and proximal term, with Optuna (extra `fedbuff[tune]`)."""
