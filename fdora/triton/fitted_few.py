"""The model of few.py fitted to 178 pairs of times: written by `python -m bench.fit_few --write`."""

NARROW = (0.8467, 75360.0, 22350.0, 2.033, 5.3, 9.24, 1.341)  # NarrowFit
BESIDE = (4.813, 0.7924, 11.57, 0.2382, 0.0813)  # BesideFit
