"""The model of few.py fitted to 178 pairs of times: written by `python -m bench.fit_few --write`."""

NARROW = (0.8391, 74790.0, 22010.0, 2.183, 5.095, 8.912, 1.296)  # NarrowFit
BESIDE = (4.619, 0.8251, 11.07, 0.264, 0.1003)  # BesideFit
