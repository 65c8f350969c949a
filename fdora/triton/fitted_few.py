"""The model of few.py fitted to 178 pairs of times: written by `python -m bench.fit_few --write`."""

NARROW = (0.8539, 74620.0, 22220.0, 2.27, 5.067, 8.828, 1.285)  # NarrowFit
BESIDE = (5.049, 0.7444, 10.9, 0.2918, 0.0996)  # BesideFit
