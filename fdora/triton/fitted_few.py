"""The model of few.py fitted to 178 pairs of times: written by `python -m bench.fit_few --write`."""

NARROW = (0.8595, 75600.0, 22770.0, 2.764, 4.737, 8.784, 1.279)  # NarrowFit
BESIDE = (4.794, 0.8213, 11.59, 0.2181, 0.09659)  # BesideFit
