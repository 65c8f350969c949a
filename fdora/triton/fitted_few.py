"""The model of few.py fitted to 70 pairs of times: written by `python -m bench.fit_few --write`."""

NARROW = (0.8544, 77690.0, 20220.0, 2.769, 4.036, 7.113)  # NarrowFit
BESIDE = {True: 7.83, False: 15.06}  # us, forward and backward
