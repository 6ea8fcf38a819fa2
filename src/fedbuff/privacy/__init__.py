"""Differential privacy: clip, noise streams, accountant, ledger, and the plan that binds them."""
