"""The model of few.py fitted to 70 pairs of times: written by `python -m bench.fit_few --write`."""

NARROW = (0.8747, 77970.0, 21900.0, 2.429, 4.63, 8.412)  # NarrowFit
BESIDE = {True: 8.312, False: 15.48}  # us, forward and backward
