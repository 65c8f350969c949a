"""Benchmarks. Tiles are those that fdora has, whatever `fdora tune` wrote on this machine."""

import os

os.environ.setdefault("FDORA_TILES", "0")
