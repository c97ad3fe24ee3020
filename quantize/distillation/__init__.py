"""Training a small drafter for a target; the only folder here that needs torch."""
