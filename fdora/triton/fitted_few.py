"""The model of few.py fitted to 70 pairs of times: written by `python -m bench.fit_few --write`."""

NARROW = (0.8572, 78450.0, 20380.0, 3.113, 3.726, 7.067)  # NarrowFit
BESIDE = {True: 8.172, False: 14.72}  # us, forward and backward
