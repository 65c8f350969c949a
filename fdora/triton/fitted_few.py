"""The model of few.py fitted to 70 pairs of times: written by `python -m bench.fit_few --write`."""

NARROW = (0.8619, 78200.0, 20510.0, 3.055, 3.779, 7.088)  # NarrowFit
BESIDE = {True: 8.158, False: 14.56}  # us, forward and backward
