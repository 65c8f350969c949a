"""The device under test, set once from --device."""

NAME = "cpu"
