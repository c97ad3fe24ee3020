"""Calibration and demo prompts, written for this project."""
