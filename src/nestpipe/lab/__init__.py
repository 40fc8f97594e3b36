"""Measurements: ladders whose rungs run side by side, shaped links and disks, profiles and advice."""
