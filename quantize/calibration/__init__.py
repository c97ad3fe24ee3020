"""Calibration: text, activation ranges, quantised graphs, and what they lose."""
