"""The model of few.py fitted to 178 pairs of times: written by `python -m bench.fit_few --write`."""

NARROW = (0.842, 74610.0, 21790.0, 2.19, 5.134, 8.825, 1.293)  # NarrowFit
BESIDE = (4.555, 0.8435, 10.99, 0.2696, 0.101)  # BesideFit
