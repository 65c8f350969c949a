"""The model of few.py fitted to 178 pairs of times: written by `python -m bench.fit_few --write`."""

NARROW = (0.8585, 75130.0, 22830.0, 2.703, 4.699, 8.771, 1.28)  # NarrowFit
BESIDE = (4.766, 0.7776, 11.31, 0.2499, 0.1003)  # BesideFit
