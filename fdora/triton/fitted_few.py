"""The model of few.py fitted to 178 pairs of times: written by `python -m bench.fit_few --write`."""

NARROW = (0.8662, 75020.0, 22720.0, 2.935, 4.495, 8.44, 1.293)  # NarrowFit
BESIDE = (4.99, 0.7691, 11.17, 0.2647, 0.09988)  # BesideFit
